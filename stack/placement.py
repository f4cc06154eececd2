"""Assign the parts of a run to the GPUs of the nodes: computed from the config alone, without looking at a machine.

A node is `local`, the machine of `ratchet up`, or the IP address of a node of the Ray cluster. Every process that uses
GPUs is started with CUDA_VISIBLE_DEVICES, so that two parts cannot take the same one. Engine and learner of one set
share a GPU if the config names it for both and the engine's arguments name its share of the memory.

The engine sets of one stack share its GPUs in this order, and in each step the set that was added first is at the
front, so that a set that comes or grows moves no part of another:

1. GPUs that a config names.
2. GPUs that were chosen for a part before. If the config of another set names one, that is refused.
3. Free GPUs, for engines, and then for the learner.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from urllib.parse import urlsplit

from ratchet.config import PlacedEnginesConfig, RunConfig
from ratchet.config_engines import DEFAULT_SET, FIRST_REMOTE_PORT, LOCAL
from ratchet.errors import ConfigError
from stack.listen_addresses import address_of_url, listen_address, require_own_addresses

LEARNER = "learner"
ENGINE = "engine"
_NUMBER = re.compile(r"-\d+$")
_URL_PORT = re.compile(r":\d+$")
_SIZES = {
    "--tensor-parallel-size": ("-tp", "tensor"),
    "--pipeline-parallel-size": ("-pp", "pipeline"),
    "--data-parallel-size": ("-dp", "data"),
}
"""vLLM's arguments whose product is the number of GPUs of one engine, with their short names."""
SHARING_ARGS = ("--gpu-memory-utilization", "0.4")
"""An engine's share of the memory of a GPU that it has together with a rank, if none is chosen."""
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_LARGEST_SHARE = 0.8
_MEMORY_BESIDE = 0.05
"""The part of a shared GPU's memory that neither allocates: CUDA's contexts, NCCL's buffers."""


PartGpus = Mapping[str, Sequence[int]]
"""Part → the GPUs that were chosen for it before, which it keeps."""


@dataclass(slots=True, frozen=True)
class SetToPlace:
    """An engine set with the config of its run. `num_ranks`: of the learner. `kept`: what was chosen before."""

    config: RunConfig
    num_ranks: int
    kept: PartGpus = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class PlacedEngine:
    """One engine. `name`: of its part. `gpus`: indexes on its node; empty on a CPU or if vLLM chooses itself.

    `address`: of a server that already runs, else None. `port`: None if the stack chooses it.
    """

    name: str
    node: str
    port: int | None
    gpus: tuple[int, ...]
    args: tuple[str, ...]
    address: str | None = None


@dataclass(slots=True, frozen=True)
class PlacedGpu:
    """One line of the table: what uses this GPU; `gpu` is None for a part that uses none."""

    node: str
    gpu: int | None
    part: str


@dataclass(slots=True, frozen=True)
class Placement:
    """`learner`: node -> GPUs of the learner's ranks; empty if the learner uses no GPU. `engine_share`: of the memory
    of a GPU that an engine and a rank share; 0 if they share none."""

    engines: tuple[PlacedEngine, ...]
    learner: dict[str, tuple[int, ...]]
    engine_share: float = 0.0

    @property
    def rank_share(self) -> float:
        """The share of a GPU's memory that a rank may allocate."""
        return max(round(1 - self.engine_share - _MEMORY_BESIDE, 3), _MEMORY_BESIDE) if self.engine_share else 1.0

    @property
    def rank_variables(self) -> dict[str, str]:
        """Variables that keep torch in a rank within its share."""
        limit = f"per_process_memory_fraction:{self.rank_share}"
        return {ALLOCATOR: ",".join(filter(None, (os.environ.get(ALLOCATOR), limit)))} if self.engine_share else {}

    def rows(self) -> list[PlacedGpu]:
        """Return the table, node by node."""
        found = [
            PlacedGpu(engine.node, gpu, engine.name) for engine in self.engines for gpu in engine.gpus or (None,)
        ] + [PlacedGpu(node, gpu, LEARNER) for node, gpus in self.learner.items() for gpu in gpus]
        if not self.learner:
            found.append(PlacedGpu(LOCAL, None, LEARNER))
        return sorted(found, key=lambda row: (row.node != LOCAL, row.node, -1 if row.gpu is None else row.gpu))


def engine_name(number: int, engine_set: str = DEFAULT_SET) -> str:
    """Return the name of the part of an engine; numbers begin at 1."""
    first = ENGINE if engine_set == DEFAULT_SET else f"{ENGINE}-{engine_set}"
    return first if number == 1 else f"{first}-{number}"


def part_kind(part: str) -> str:
    """Return `engine` for the part of any engine, and the first word of any other part (`Stack.box_gateways`)."""
    return ENGINE if part.startswith(f"{ENGINE}-") else part.partition(" ")[0]


def set_of_part(part: str) -> str | None:
    """Return the engine set of an engine's part, None for any other part."""
    if part_kind(part) != ENGINE:
        return None
    return _NUMBER.sub("", part).removeprefix(ENGINE).removeprefix("-") or DEFAULT_SET


def place(config: RunConfig, num_ranks: int, num_gpus: Mapping[str, int]) -> Placement:
    """Place every part of one run that has the machines for itself; `place_sets` describes the rest."""
    return place_sets([SetToPlace(config, num_ranks)], num_gpus)[config.engine_set]


def place_sets(sets: Sequence[SetToPlace], num_gpus: Mapping[str, int]) -> dict[str, Placement]:
    """Return engine set → its placement beside the others. `num_gpus`: node -> number of its GPUs; the indexes of a
    node that is missing are not checked.

    Raises ConfigError, naming part, node and GPU, and the engine sets if there are several, if a GPU is used twice or
    does not exist, or if there are too few.
    """
    owners = _Owners(num_gpus, names_sets=len(sets) > 1)
    for step in (_take_named, _take_kept):  # of every set, before one of them takes what is free
        for one in sets:
            owners.engine_set = one.config.engine_set
            step(one, owners)
    placed: dict[str, Placement] = {}
    for one in sets:
        owners.engine_set = one.config.engine_set
        placed[one.config.engine_set] = _place_set(one, owners)
    _require_own_ports([engine for placement in placed.values() for engine in placement.engines])
    return placed


def _take_named(one: SetToPlace, owners: "_Owners") -> None:
    config = one.config
    for entry, own in _named_entries(config):
        if memory_share([*config.engine.args, *entry.args]) is not None:
            owners.sharing |= {(config.engine_set, name) for name in own}
        owners.take_named(entry.host, own, entry.gpus or ())
    for node, gpus in (config.training.gpus or {}).items():
        owners.take_named(node, [LEARNER], gpus)


def _take_kept(one: SetToPlace, owners: "_Owners") -> None:
    config = one.config
    for entry, own in _named_entries(config):
        needed = gpus_per_engine([*config.engine.args, *entry.args])
        for name in own:
            kept = one.kept.get(name, ())
            if entry.gpus is None and entry.address is None and len(kept) == needed:
                owners.take_kept(entry.host, name, kept)
    if config.training.gpus is None and _has_learner(config, owners):
        owners.take_kept(LOCAL, LEARNER, one.kept.get(LEARNER, ()))


def _has_learner(config: RunConfig, owners: "_Owners") -> bool:
    """Return whether the set's learner may have GPUs: an evaluation trains nothing, and another set's may need them."""
    return not owners.names_sets or config.training.steps > 0


def _place_set(one: SetToPlace, owners: "_Owners") -> Placement:
    engines = [
        engine for entry, own in _named_entries(one.config) for engine in _engines_of(one.config, entry, own, owners)
    ]
    return _with_shares(one.config, Placement(tuple(engines), _learner_gpus(one, owners, engines)))


def _with_shares(config: RunConfig, placed: Placement) -> Placement:
    """Return the placement with the engines' share of GPUs that are the learner's, too. Raises ConfigError."""
    of_learner = {(node, gpu) for node, gpus in placed.learner.items() for gpu in gpus if config.training.steps}
    engines, shares = [], [0.0]
    for one in placed.engines:
        if any((one.node, gpu) in of_learner for gpu in one.gpus):
            if memory_share([*config.engine.args, *one.args]) is None:
                one = replace(one, args=(*one.args, *SHARING_ARGS))
            shares.append(memory_share([*config.engine.args, *one.args]) or 0.0)
        engines.append(one)
    if max(shares) > _LARGEST_SHARE:
        raise ConfigError(
            f"--gpu-memory-utilization={max(shares)} leaves the learner no memory on the GPUs that it shares with an "
            f"engine; give the engine at most {_LARGEST_SHARE}, or GPUs of its own"
        )
    return Placement(tuple(engines), placed.learner, max(shares))


class _Owners:
    """The engine set and the part to which each GPU was given. `engine_set`: the set that is placed now."""

    def __init__(self, num_gpus: Mapping[str, int], names_sets: bool) -> None:
        self.num_gpus = num_gpus
        self.names_sets = names_sets
        self.engine_set = DEFAULT_SET
        self.part_of: dict[tuple[str, int], tuple[str, str]] = {}  # (engine set, part)
        self.shared: dict[tuple[str, int], tuple[str, str]] = {}  # the learner that has an engine's GPU, too
        self.sharing: set[tuple[str, str]] = set()  # engines that leave memory to a learner
        self.named: set[tuple[str, int]] = set()

    def take_named(self, node: str, parts: Sequence[str], gpus: Sequence[int]) -> None:
        """Give `gpus` to `parts` in order, each the same number."""
        if len(gpus) % len(parts):
            raise ConfigError(
                f"engines: {len(gpus)} GPUs of {node} cannot be shared out to {len(parts)} engines evenly; "
                "change gpus or count"
            )
        each = len(gpus) // len(parts)
        for at, gpu in enumerate(gpus):
            self._take(node, gpu, parts[at // each])
            self.named.add((node, gpu))

    def _take(self, node: str, gpu: int, part: str) -> None:
        known = self.num_gpus.get(node)
        if known is not None and gpu >= known:
            has = f"has GPUs 0 to {known - 1}" if known else "has no GPU"
            raise ConfigError(f"{self._named(part)} is given GPU {gpu} of {node}, which {has}; change its gpus")
        parts, owner = self.part_of, self.part_of.get((node, gpu))
        if part == LEARNER and owner in self.sharing and owner[0] == self.engine_set:
            parts, owner = self.shared, self.shared.get((node, gpu))
        if owner is not None:
            other_set, other = owner
            raise ConfigError(
                f"GPU {gpu} of {node} is given to {self._named(other, other_set)} and to {self._named(part)}; give "
                "each its own in engines.gpus and training.gpus, or let an engine share with the learner of its set by "
                f"{' '.join(SHARING_ARGS)} in engine.args"
            )
        parts[node, gpu] = (self.engine_set, part)

    def _named(self, part: str, engine_set: str = "") -> str:
        return f"{part} (engine set {engine_set or self.engine_set})" if self.names_sets else part

    def free(self, node: str) -> list[int]:
        """Return the free GPUs of a node. On one whose GPUs are not known, all indexes are taken to exist."""
        return [gpu for gpu in range(self.num_gpus.get(node, 1024)) if (node, gpu) not in self.part_of]

    def take_kept(self, node: str, part: str, kept: Sequence[int]) -> None:
        """Give a part the GPUs that it had before, if all are free. Raises ConfigError if the config of another set
        names one of them, whose part would have to move."""
        for gpu in kept:
            if (node, gpu) in self.named and self.part_of[node, gpu][0] != self.engine_set:
                self._take(node, gpu, part)
        if set(kept) <= set(self.free(node)):
            for gpu in kept:
                self._take(node, gpu, part)

    def take_free(self, node: str, part: str, number: int) -> tuple[int, ...]:
        """Give a part the first free GPUs, and after them those that the learner of its set was not given by name."""
        free = self.free(node)
        if len(free) < number:
            given_up = [gpu for gpu in self.of(LEARNER).get(node, ()) if (node, gpu) not in self.named]
            for gpu in given_up:
                del self.part_of[node, gpu]
            free += given_up
        if len(free) < number:
            holders = sorted({self._named(part, name) for name, part in self.part_of.values()})
            held = f" (the others: {', '.join(holders)})" if self.names_sets else ""
            raise ConfigError(
                f"{self._named(part)} needs {number} GPUs of {node}, of whose {self.num_gpus.get(node)} only "
                f"{len(free)} are free{held}; lower engines.count or the parallel sizes in args, name another host, or "
                "leave some free in training.gpus"
            )
        taken = tuple(free[:number])
        for gpu in taken:
            self._take(node, gpu, part)
        return taken

    def of(self, part: str) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for (node, gpu), owner in (*self.part_of.items(), *self.shared.items()):
            if owner == (self.engine_set, part):
                found.setdefault(node, []).append(gpu)
        return {node: tuple(sorted(gpus)) for node, gpus in found.items()}


def _named_entries(config: RunConfig) -> Iterator[tuple[PlacedEnginesConfig, list[str]]]:
    """Yield each entry of `engines` with the names of its parts."""
    number = 1
    for entry in config.engines:
        yield entry, [engine_name(number + at, config.engine_set) for at in range(entry.count)]
        number += entry.count


def _engines_of(
    config: RunConfig, entry: PlacedEnginesConfig, names: Sequence[str], owners: _Owners
) -> Iterator[PlacedEngine]:
    if entry.address is not None:
        yield PlacedEngine(names[0], _URL_PORT.sub("", urlsplit(entry.address).netloc), None, (), (), entry.address)
        return
    first = entry.port if entry.port is not None or entry.host == LOCAL else FIRST_REMOTE_PORT
    needed = gpus_per_engine([*config.engine.args, *entry.args])
    for at, name in enumerate(names):
        gpus = owners.of(name).get(entry.host, ())
        if gpus and len(gpus) != needed:
            raise ConfigError(
                f"{name} is given {len(gpus)} GPUs of {entry.host}, but its vLLM arguments use {needed} (tensor x "
                "pipeline x data parallel); change gpus, or set --tensor-parallel-size in args"
            )
        if not gpus and owners.num_gpus.get(entry.host, entry.host != LOCAL):
            gpus = owners.take_free(entry.host, name, needed)
        yield PlacedEngine(name, entry.host, None if first is None else first + at, gpus, tuple(entry.args))


def gpus_per_engine(args: Sequence[str]) -> int:
    """Return how many GPUs these vLLM arguments use; the last of equal arguments counts."""
    sizes = _parallel_sizes(args)
    return sizes["tensor"] * sizes["pipeline"] * sizes["data"]


def cache_gpus(args: Sequence[str]) -> int:
    """Return how many GPUs one copy of the weights and its cache are shared out to."""
    sizes = _parallel_sizes(args)
    return sizes["tensor"] * sizes["pipeline"]


def memory_share(args: Sequence[str]) -> float | None:
    """Return the share of a GPU's memory that these vLLM arguments name; None if they name none."""
    words = [word for arg in args for word in arg.split("=", 1)]
    found = [value for name, value in pairwise(words) if name.replace("_", "-") == SHARING_ARGS[0]]
    return float(found[-1]) if found and re.fullmatch(r"\d*\.?\d+", found[-1]) else None


def _parallel_sizes(args: Sequence[str]) -> dict[str, int]:
    sizes = {kind: 1 for _, kind in _SIZES.values()}
    words = [word for arg in args for word in arg.split("=", 1)]
    for name, value in pairwise(words):
        for long, (short, kind) in _SIZES.items():
            if name.replace("_", "-") in (long, short) and value.isdigit():
                sizes[kind] = int(value)
    return sizes


def _require_own_ports(engines: Sequence[PlacedEngine]) -> None:
    named = {one.name: listen_address(one.node, one.port) for one in engines if one.port is not None}
    named |= {one.name: address_of_url(one.address) for one in engines if one.address is not None}
    require_own_addresses(named)


def _learner_gpus(one: SetToPlace, owners: _Owners, engines: Sequence[PlacedEngine]) -> dict[str, tuple[int, ...]]:
    """Return the learner's GPUs: those named, else those it had, else, if too few, all free ones of this machine."""
    config, num_ranks = one.config, one.num_ranks
    if not _has_learner(config, owners):
        return {}
    found = owners.of(LEARNER)
    if config.training.gpus is None and owners.num_gpus.get(LOCAL, 0):
        if len(found.get(LOCAL, ())) < max(num_ranks, 1):
            owners.take_free(LOCAL, LEARNER, len(owners.free(LOCAL)))
        found = {LOCAL: owners.of(LEARNER).get(LOCAL, ())}
        if not found[LOCAL] and config.engines == (PlacedEnginesConfig(),):
            found = {LOCAL: engines[0].gpus}  # nothing was said about GPUs, and one engine has the only one
    given = sum(len(gpus) for gpus in found.values())
    if (found or config.training.gpus is not None) and given < num_ranks and config.training.steps:
        learner = "the learner" if not owners.names_sets else f"the learner of engine set {config.engine_set}"
        raise ConfigError(
            f"{learner}'s {num_ranks} ranks need a GPU each and have {given}; lower training.workers, name more in "
            "training.gpus, or lower engines.count"
        )
    return found
