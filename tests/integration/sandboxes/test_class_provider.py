"""A class with four methods is a sandbox service, and each further method adds one thing."""

import asyncio
import shutil
import uuid
from typing import ClassVar

import pytest

from ratchet.errors import CommandFailedError, ConfigError, SandboxBusyError, SandboxGoneError
from sandboxes.base import BoxLimits, Network, OpenedFirst, Sandbox
from sandboxes.class_provider import ClassProvider
from tests.standins.local_box import LocalBox, ReattachedBox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="its boxes are started by bubblewrap")


async def create(provider: ClassProvider, key: str = "", network: Network = True) -> Sandbox:
    return await provider.create(
        "host", ttl_seconds=60, metadata={"owner": "us"}, idempotency_key=key or uuid.uuid4().hex, network=network
    )


async def test_four_methods_do_what_stages_ask_for() -> None:
    provider = ClassProvider(LocalBox, "my_boxes:LocalBox")
    async with await create(provider) as box:
        result = await box.exec('echo "$A:$PWD"; echo e >&2; exit 3', env={"A": "x 'y"}, cwd="/tmp", check=False)
        assert (result.exit_code, result.stdout, result.stderr) == (3, "x 'y:/tmp\n", "e\n")
        assert (await box.exec("pwd; id -un", user="agent")).stdout == "/home/agent\nagent\n"
        assert (await box.exec("true", cwd="/not/there", check=False)).exit_code == 126
        with pytest.raises(CommandFailedError) as late:
            await box.exec("sleep 30", timeout=0.3)
        assert late.value.timed_out
        await box.write_file("/workspace/a/b", b"\x00\xff")
        assert await box.read_file("/workspace/a/b") == b"\x00\xff"
        assert await box.read_file("/workspace/a/b", max_bytes=1) == b"\x00"
        with pytest.raises(FileNotFoundError):
            await box.read_file("/workspace/missing")
        with pytest.raises(CommandFailedError):
            await box.read_file("/workspace")
    with pytest.raises(SandboxGoneError):
        await provider.connect(box.id)


async def test_boxes_are_kept_by_key_described_and_ended() -> None:
    provider = ClassProvider(LocalBox, "my_boxes:LocalBox")
    key = uuid.uuid4().hex
    first, second = await asyncio.gather(create(provider, key), create(provider, key))
    other = await create(provider)
    assert first.id == second.id != other.id
    assert {info.id for info in await provider.list({"owner": "us"})} == {first.id, other.id}
    assert (await provider.describe(first.id)).carries({"owner": "us"}) and await provider.list({"owner": "no"}) == []
    assert [await provider.kill(first.id) for _ in range(2)] == [True, False]
    assert (await create(provider, key)).id != first.id
    for info in await provider.list({}):
        await provider.kill(info.id)


async def test_what_a_run_does_without_is_said_and_a_method_takes_it_away() -> None:
    without = " ".join(ClassProvider(LocalBox, "x:y").capabilities.without)
    for named in ("`connect`", "`list`", "`set_ttl`", "`network`"):
        assert named in without
    assert "`connect`" not in " ".join(ClassProvider(ReattachedBox, "x:y").capabilities.without)


async def test_a_network_is_open_first_if_the_class_can_close_it() -> None:
    class Switched(LocalBox):
        networks: ClassVar[list[object]] = []

        def __init__(self, image: str, network: object) -> None:
            super().__init__(image)
            self.networks.append(network)

        def set_network(self, network: bool) -> None:
            self.networks.append(network)

    async with await create(ClassProvider(Switched, "x:y"), network=OpenedFirst(False)) as box:
        await box.set_network(False)
    assert Switched.networks == ["open", False]
    with pytest.raises(ConfigError, match="pre_commands: x:y has no `network` and `set_network`"):
        await create(ClassProvider(LocalBox, "x:y"), network=OpenedFirst(True))


async def test_with_connect_another_worker_finds_the_box_and_whose_it_is() -> None:
    first, second = ClassProvider(ReattachedBox, "x:y"), ClassProvider(ReattachedBox, "x:y")
    box = await create(first)
    await box.write_file("/tmp/x", "one")
    again = await second.connect(box.id)
    assert await again.read_file("/tmp/x") == b"one"
    assert (await second.describe(box.id)).metadata == {"owner": "us"}
    assert await second.kill(box.id)
    third = ClassProvider(ReattachedBox, "x:y")
    assert not await third.kill(box.id)
    with pytest.raises(SandboxGoneError, match="there is no box"):
        await third.connect(box.id)


async def test_failures_of_the_class_are_those_of_a_service() -> None:
    class Failing(LocalBox):
        async def __aenter__(self) -> "Failing":
            raise OSError("no room")

    class Broken(LocalBox):
        async def exec(self, *arguments: object, **options: object) -> tuple[int, bytes, bytes]:
            raise RuntimeError("connection lost")

    with pytest.raises(SandboxBusyError, match="no room"):
        await create(ClassProvider(Failing, "x:y"))
    provider = ClassProvider(Broken, "x:y")
    box = await create(provider)
    with pytest.raises(SandboxGoneError, match="connection lost"):
        await box.exec("true")
    await box.kill()
    with pytest.raises(ConfigError, match="memory_mib"):
        await provider.create("host", ttl_seconds=1, metadata={}, idempotency_key="k", limits=BoxLimits(num_cpus=1))


async def test_a_box_whose_end_fails_is_kept_until_it_ends_or_runs_no_command() -> None:
    class Stubborn(LocalBox):
        is_stubborn = True

        async def __aexit__(self, *error: object) -> None:
            if self.is_stubborn:
                raise OSError("connection lost")
            await super().__aexit__(*error)

    provider = ClassProvider(Stubborn, "x:y")
    key = uuid.uuid4().hex
    box = await create(provider, key)
    for _ in range(7):
        with pytest.raises(SandboxBusyError, match="connection lost"):
            await provider.kill(box.id)
    assert [info.id for info in await provider.list({})] == [box.id] and (await create(provider, key)).id == box.id
    Stubborn.is_stubborn = False
    assert await provider.kill(box.id) and not await provider.list({})

    Stubborn.is_stubborn = True
    gone = await create(provider)
    shutil.rmtree(gone.made.root)  # type: ignore[attr-defined]
    for _ in range(4):  # a service that is away looks the same
        with pytest.raises(SandboxBusyError):
            await provider.kill(gone.id)
    assert await provider.kill(gone.id) and not await provider.kill(gone.id) and not await provider.list({})


async def test_keys_of_ended_boxes_and_failed_creations_are_forgotten() -> None:
    class Full(LocalBox):
        async def __aenter__(self) -> "Full":
            raise OSError("no room")

    full, provider = ClassProvider(Full, "x:y"), ClassProvider(LocalBox, "x:y")
    with pytest.raises(SandboxBusyError):
        await create(full)
    async with await create(provider):
        assert len(provider._by_key) == 1
    assert not full._by_key and not provider._by_key
