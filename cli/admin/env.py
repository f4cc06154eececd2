"""`ratchet admin env`: print the environment variables with which stock tools find the stack."""


def env() -> None:
    """Print `export` lines. After eval "$(ratchet admin env)", psql and the E2B SDK find the stack.

    So does temporal: PATH gets the directory of the CLI if it is in the cache, unless PATH has a temporal already.
    """
    import shlex
    import shutil

    from stack.parts import Stack
    from stack.temporal_server import installed_temporal_cli

    for name, value in Stack().environment().items():
        print(f"export {name}={shlex.quote(value)}")
    temporal = installed_temporal_cli()
    if temporal is not None and shutil.which("temporal") is None:
        print(f'export PATH={shlex.quote(str(temporal.parent))}:"$PATH"')
