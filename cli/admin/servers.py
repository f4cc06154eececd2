"""`ratchet admin codec-server`: serve payloads to Temporal's UI and CLI."""

import os

from cli.console import say
from ratchet.errors import ConfigError
from stack.parts import Stack


def codec_server() -> None:
    """Serve Temporal's codec protocol on loopback until Ctrl-C, with the keys of RATCHET_PAYLOAD_KEY_FILE.

    Enter the printed address in the Temporal UI as codec endpoint, or give it to the CLI with --codec-endpoint.
    """
    import uvicorn

    from ratchet.payload_codec import KEY_FILE_SETTING, encryption_codec
    from stack.codec_server import codec_app

    codec = encryption_codec()
    if codec.newest is None:
        raise ConfigError(f"{KEY_FILE_SETTING} names no file with keys, so there is nothing to decrypt")
    stack = Stack()
    token, port = stack.kept_secret("codec.token"), stack.ports["codec_server"]
    ui_origin = (os.environ.get("RATCHET_TEMPORAL_UI") or stack.temporal_ui).rstrip("/")
    print(f"http://127.0.0.1:{port}/{token}", flush=True)
    say(f"for pages of {ui_origin}; Ctrl-C ends it")
    app = codec_app(codec, token, ui_origin)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)
