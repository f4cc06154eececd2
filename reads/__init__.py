"""Questions about runs, rollouts, tokens and costs; the CLI, the client and the viewer's pages format the answers.

Each query reads through an index and returns a bounded number of rows, so that it stays fast with 10⁵ rollouts and
10⁶ turns.
"""
