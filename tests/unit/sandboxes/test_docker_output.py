"""The end mark is found however a stream is split. What shells write is tested in tests/integration/sandboxes."""

from sandboxes.docker_output import MarkedStream, new_mark


def test_a_stream_may_be_split_anywhere() -> None:
    mark = new_mark()
    whole = b"some \x1e output" + mark[:5].encode() + f"{mark} 12.\n".encode() + b"of a child"
    for first in range(len(whole)):
        for second in range(first, len(whole), 7):
            stream = MarkedStream(mark)
            pieces = [stream.feed(part) for part in (whole[:first], whole[first:second], whole[second:])]
            assert b"".join(pieces) == b"some \x1e output" + mark[:5].encode()
            assert stream.exit_code == 12


def test_a_stream_without_its_whole_mark_has_no_end() -> None:
    mark = new_mark()
    for cut in range(len(f"{mark} 0.")):
        stream = MarkedStream(mark)
        stream.feed(b"output" + f"{mark} 0."[:cut].encode())
        assert stream.exit_code is None


def test_output_is_passed_on_while_the_command_runs() -> None:
    stream = MarkedStream(new_mark())
    assert stream.feed(b"one\n") == b"one\n"
