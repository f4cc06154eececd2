"""`ratchet env`: print the environment variables with which stock tools find the stack."""


def env() -> None:
    """Print `export` lines. After eval "$(ratchet env)", temporal, psql and the E2B SDK find the stack."""
    import shlex

    from stack.parts import Stack

    for name, value in Stack().environment().items():
        print(f"export {name}={shlex.quote(value)}")
