"""Passes that begin at the first swapped site: modules that end before it give what they gave without the swap."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.runtime.network import cuda_devices

_MOST_KEPT = 2**29  # bytes of outputs; of a network that gives more, those of its inner modules are computed again
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

_Leaves = list[tuple[object, int]]  # what a value is made of, and how often each tensor has been changed in place


@dataclass
class Recording:
    """What the modules of a network gave in one pass.

    Attributes:
        outputs: of each module that was called once, by path.
        left: when its call ended, by path; calls are counted as they begin and end.
        entered: when each site was first called, by path.
        unsafe: paths of modules that cannot be replayed: called several times, or changing what they are given.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    unsafe: set[str] = field(default_factory=set)
    _leaves: dict[str, _Leaves] = field(default_factory=dict)
    _nbytes: dict[str, int] = field(default_factory=dict)
    _clock: int = 0
    _kept_bytes: int = 0

    def ended_before(self, sites: Iterable[str]) -> list[str]:
        """Paths of the modules whose calls ended before the first of some sites was called."""
        first = min(self.entered.get(path, -1) for path in sites)
        return [path for path, left in self.left.items() if left < first]

    def begun(self, replayed: Iterable[str], sites: Iterable[str]) -> Recording:
        """A recording of a pass that replays these modules of this one, until the first of the sites is called."""
        first = min(self.entered.get(path, -1) for path in sites)
        kept = list(replayed)
        return Recording(
            {path: self.outputs[path] for path in kept},
            {path: self.left[path] for path in kept},
            {path: time for path, time in self.entered.items() if time < first},
            self.unsafe,
            {path: self._leaves[path] for path in kept},
            {path: self._nbytes[path] for path in kept},
            self._clock,
            sum(self._nbytes[path] for path in kept),
        )

    def enter(self, path: str) -> None:
        """Note that a site is called."""
        self._clock += 1
        self.entered.setdefault(path, self._clock)

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module's forward, and keep what it gives if it does nothing else."""
        before = None if path in self.unsafe else _leaves_of((args, kwargs))
        output = forward(*args, **kwargs)
        self._clock += 1
        leaves = _leaves_of(output)
        plain = before is not None and leaves is not None and _same(_leaves_of((args, kwargs)), before)
        if leaves is None or not plain or path in self.unsafe or path in self.left:
            self.forget(path)
        else:
            self.left[path], self._leaves[path] = self._clock, leaves
            self.outputs[path] = _rebuilt(output)
            self._nbytes[path] = sum(leaf.nbytes for leaf, _ in leaves if isinstance(leaf, Tensor))
            self._kept_bytes += self._nbytes[path]
            if self._kept_bytes > _MOST_KEPT:
                self._make_room()
        return output

    def forget(self, path: str) -> None:
        """Let a module always be run."""
        self.unsafe.add(path)
        self._kept_bytes -= self._nbytes.get(path, 0)
        for kept in (self.outputs, self.left, self._leaves, self._nbytes):
            kept.pop(path, None)

    def settle(self) -> None:
        """Forget the outputs that the network has changed in place since."""
        for path in [path for path, leaves in self._leaves.items() if _changed(leaves)]:
            self.forget(path)

    @property
    def intact(self) -> bool:
        """Whether all outputs are as they were given."""
        return not any(_changed(leaves) for leaves in self._leaves.values())

    def _make_room(self) -> None:
        """Forget what lies deepest in the network: with the blocks around it most is saved."""
        while self._kept_bytes > _MOST_KEPT:
            deepest = max(path.count(".") for path in self._nbytes)
            for path in [path for path in self._nbytes if path.count(".") == deepest]:
                self.forget(path)


class Replay:
    """A network whose passes can be recorded, and begun at the first of the sites that are swapped.

    What is replayed is what the network would compute again, to the bit: modules that are called once, on plain
    arguments that they leave as they are, with outputs that nothing changes in place. All others are run each time, as
    is the code between modules. Nothing is replayed of a network with hooks of others, of one that draws random
    numbers, or of one that sets anything on its modules.

    Attributes:
        possible: whether passes can be replayed; False from the first sign on that they cannot.
    """

    def __init__(self, model: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
        """Choose the modules to watch: those that hold sites, and those that stand beside these and sites."""
        self._model, self._replacements = model, replacements
        self._devices = cuda_devices(model)
        self._paths = dict(_watched("", model, set(replacements)))
        distinct = len({id(module) for module in replacements.values()}) == len(replacements)
        seen = all(map(can_be_watched, replacements.values()))
        self.possible = distinct and seen and not _has_hooks(model) and not _runs_elsewhere(model)
        self._given: dict[str, Any] = {}
        self._begins_at: set[str] = set()
        self._recording: Recording | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the modules' calls meanwhile."""
        watched: list[nn.Module] = []
        try:
            if self.possible:
                for path, module in [*self._paths.items(), *self._replacements.items()]:
                    if can_be_watched(module):
                        vars(module)["forward"] = self._forward(path, module.forward, path in self._replacements)
                        watched.append(module)
            yield
        finally:
            for module in watched:
                vars(module).pop("forward", None)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Record the pass of the block, which runs the network as it is."""
        recording = Recording()
        if not self.possible:
            yield recording
            return
        state = _State.of(self._model)
        with self._passing({}, recording):
            yield recording
        recording.settle()
        self.possible = self.possible and state == _State.of(self._model)

    @contextlib.contextmanager
    def begun_at(self, sites: Iterable[str], before: Recording, record: bool = False) -> Iterator[Recording]:
        """Let the pass of the block begin at the first of some sites: before it all is as it was when recorded.

        Args:
            sites: those that are swapped now, and were not while ``before`` was recorded.
            before: that pass, over the same inputs.
            record: whether this pass is recorded, too.
        """
        sites = list(sites)
        replayed = before.ended_before(sites) if self.possible else []
        recording = before.begun(replayed, sites)
        self._begins_at = set(sites)
        with self._passing({path: before.outputs[path] for path in replayed}, recording if record else None):
            yield recording
        if record:
            recording.settle()
        self.possible = self.possible and before.intact

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Look whether the block draws random numbers: what is replayed would draw none."""
        before = self._random_states()
        yield
        self.possible = self.possible and all(map(torch.equal, before, self._random_states()))

    def _random_states(self) -> list[Tensor]:
        if not self.possible:
            return []
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    @contextlib.contextmanager
    def _passing(self, given: dict[str, Any], recording: Recording | None) -> Iterator[None]:
        self._given, self._recording = given, recording
        try:
            yield
        finally:
            self._given, self._begins_at, self._recording = {}, set(), None

    def _forward(self, path: str, forward: Callable[..., Any], is_site: bool) -> Callable[..., Any]:
        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if path in self._begins_at:
                self._given = {}  # what is called again from here on, in a loop perhaps, is called with something else
            elif path in self._given:
                return _rebuilt(self._given[path])
            if self._recording is None:
                return forward(*args, **kwargs)
            if is_site:
                self._recording.enter(path)
            return self._recording.call(path, forward, args, kwargs)

        return watched


@dataclass(frozen=True)
class _State:
    """What a pass may leave behind on modules: other attributes, and tensors that it changed."""

    attributes: list[tuple[object, ...]]
    values: list[object] = field(compare=False)  # kept, so that no other object gets the id of one

    @classmethod
    def of(cls, model: nn.Module) -> _State:
        attributes: list[tuple[object, ...]] = []
        values: list[object] = []
        for module in model.modules():
            held = [*vars(module).items(), *module._parameters.items(), *module._buffers.items()]
            attributes += [(id(module), name, id(value), _size(value)) for name, value in held]
            values += [value for _, value in held]
        return cls(attributes, values)


def _size(value: object) -> int:
    """How often a tensor was changed in place, and how many entries a collection has."""
    if isinstance(value, Tensor):
        return -1 if value.is_inference() else value._version
    return len(value) if isinstance(value, (list, dict, set)) else 0


def _watched(path: str, module: nn.Module, sites: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that hold a site or are one, and their neighbours, with their paths."""
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        yield at, child
        holds_one = any(site.startswith(f"{at}.") for site in sites)
        if holds_one or type(child).forward is nn.Module.forward:  # a list of modules is never called itself
            yield from _watched(at, child, sites)


def can_be_watched(module: nn.Module) -> bool:
    """Whether a call of a module runs what stands as its ``forward``."""
    own_way = "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__
    return not own_way and module._compiled_call_impl is None and type(module).forward is not nn.Module.forward


def _has_hooks(model: nn.Module) -> bool:
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _runs_elsewhere(model: nn.Module) -> bool:
    """Whether any part is run by threads, by other processes or by TorchScript."""
    others = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)
    return any(isinstance(module, others) for module in model.modules())


def _leaves_of(value: Any) -> _Leaves | None:
    """List what a value is made of; None if it holds anything that is not plain."""
    if isinstance(value, Tensor):
        known = type(value) in (Tensor, nn.Parameter) and not value.is_inference()
        return [(value, value._version)] if known else None
    if isinstance(value, _PLAIN):
        return [(value, 0)]
    if type(value) is dict:
        value = [part for entry in value.items() for part in entry]
    elif type(value) not in (tuple, list):
        return None
    leaves: _Leaves = [(len, len(value))]
    for part in value:
        inner = _leaves_of(part)
        if inner is None:
            return None
        leaves += inner
    return leaves


def _same(some: _Leaves | None, others: _Leaves) -> bool:
    """Whether two values are made of the very same objects, all as they were."""
    if some is None or len(some) != len(others):
        return False
    return all(one is other and count == before for (one, count), (other, before) in zip(some, others, strict=True))


def _changed(leaves: _Leaves) -> bool:
    return any(isinstance(leaf, Tensor) and leaf._version != version for leaf, version in leaves)


def _rebuilt(value: Any) -> Any:
    """The same tensors in new lists and dicts, which whoever gets them may change."""
    if type(value) is dict:
        return {key: _rebuilt(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_rebuilt, value))
    return value
