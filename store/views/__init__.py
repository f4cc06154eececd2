"""Read-only queries of the viewer and of commands that show the store to people.

Each query reads through an index and returns a bounded number of rows, so that it stays fast with 10⁵ rollouts and
10⁶ turns.
"""
