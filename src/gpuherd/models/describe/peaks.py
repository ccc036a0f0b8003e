"""Measures what a model's layers need beside weights and cache, without a GPU, weights or arithmetic.

Fake tensors go through transformers' own code, and a dispatch mode counts the storages that are alive after each
operation. A few sizes are run; at each operation the living bytes are a polynomial in the batch and the tokens, so that
three lengths and two batches give its coefficients exactly. A layer's need is the largest of the polynomials of its
operations; those that never are the largest are dropped. One more size, which is no multiple of the others, is run to
check: where code computes in chunks (``Peaks.fill``) or takes another way, the curves are made to cover it.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpuherd.models.describe.description import Curve, LayerCache, Peaks, Polynomial

if TYPE_CHECKING:
    from gpuherd.models.describe.meta import Layers

_FLOAT32 = 4
_STEP = 256  # tokens between the lengths that are run, unless windows or positions are fewer
_SHORT = 32  # the same where code loops over tokens
_MANY = 150  # operations of a layer, from which on it may loop
_BATCHES = (2, 3)  # not 1: tensors of one sequence are copied less often
# What curves are compared at: those that are nowhere the largest are dropped.
_GRID = [
    (batch, tokens) for batch in (1, 2, 8, 64, 1024) for tokens in (1, 8, 64, 256, 512, 1024, 4096, 32768, 1 << 20)
]
_FILLS = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Measured:
    """Results of the runs.

    Attributes:
        called: names of all modules in the order of their first call.
        caches, peaks: of the layers that were run, by name.
    """

    called: Sequence[str]
    caches: Mapping[str, LayerCache]
    peaks: Mapping[str, Peaks]


@dataclass(frozen=True, slots=True)
class _Event:
    """Living bytes after an operation, in which module; and what bitsandbytes' own product would need there."""

    layer: str
    module: str
    operation: str
    alive: int
    matrix: int = 0
    int8: int = 0

    @property
    def place(self) -> tuple[str, str, str, int]:
        return self.layer, self.module, self.operation, self.matrix


@dataclass
class _Run:
    """The events of one size, less weights and what the layer's cache holds when the layer is done."""

    batch: int
    tokens: int
    prompt: list[_Event] = field(default_factory=list)
    token: list[_Event] = field(default_factory=list)
    caches: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)  # kind, bytes a number, numbers
    windows: dict[str, int] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)


class LivingStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living storages, and numbers each storage.

    Attributes:
        now: bytes that are alive.
        living: number and bytes of each living storage, by its address.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.living: dict[int, tuple[int, int]] = {}
        self._count = 0

    def add(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """Counts a tensor, once for each storage; without ``counts`` as one of no bytes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.living:
            size = storage.nbytes() if counts else 0
            self._count += 1
            self.living[key] = self._count, size
            self.now += size
            weakref.finalize(storage, self._gone, key)

    def add_all(self, values: Any, *, counts: bool = True) -> None:
        """Counts the tensors among values and holds none of them: what the cache gives up while it grows must not live
        on here."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, counts=counts)

    def _gone(self, key: int) -> None:
        self.now -= self.living.pop(key, (0, 0))[1]


class _Alive(LivingStorages):  # type: ignore[no-untyped-call]
    """Keeps an event for each operation."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add_all(result)
        self._trace.event(func, args, result, self.now)
        return result


class LikeCuda(TorchFunctionMode):
    """Attention whose keys and values differ in size has a fused kernel on CUDA; on the CPU torch has none, and would
    make a score for each pair of tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            options["dropout_p"] = 0.0  # of scores, which fused kernels draw again instead of keeping them
            query, key, value = args[:3] if len(args) >= 3 else (options["query"], options["key"], options["value"])
            if key.shape[-1] != value.shape[-1] and query.shape[1] == key.shape[1]:
                mask = args[3] if len(args) > 3 else options.get("attn_mask")
                return _efficient(query, key, value, mask)
        return func(*args, **options)


def _efficient(query: Any, key: Any, value: Any, mask: Any) -> Any:
    """CUDA's memory-efficient kernel, with the mask as numbers and filled up to rows of 8."""
    if mask is not None:
        numbers = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
        missing = -numbers.shape[-1] % 8
        filled = torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers
        mask = filled[..., : numbers.shape[-1]].expand(*query.shape[:3], -1)
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, torch.is_grad_enabled())[0]


class _Trace:
    """Follows one model through its runs: in which layer and module it is, and what is alive."""

    def __init__(self, model: Any, layers: Sequence[str], quantisable: Set[str]) -> None:
        self.model, self.layers = model, layers
        self.called: dict[str, None] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._matrices = {
            value.untyped_storage()._cdata: value.numel()
            for name, value in model.named_parameters()
            if name in quantisable
        }
        self._stack: list[str] = []
        self._layer = ""
        self._events: list[_Event] = []
        self._done: dict[str, int] = {}
        self._before: dict[tuple[str, int], int] = {}
        self.owners: dict[tuple[str, int], str] = {}
        self.cache: Any = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Notes each module that is entered and left."""
        with ExitStack() as stack:
            for module in self.model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: Any, _: Any) -> None:
        name = self._names[id(module)]
        self.called.setdefault(name, None)
        self._stack.append(name)
        if name in self.layers:
            self._layer = name
            self._before = _cache_sizes(self.cache)

    def _leave(self, *_: Any) -> None:
        name = self._stack.pop()
        if name in self.layers:
            now = _cache_sizes(self.cache)
            self._done[name] = sum(now.values())
            for place, size in now.items():
                if size != self._before.get(place):
                    self.owners.setdefault(place, name)
            if name == self.layers[-1] or name.rpartition(".")[0] != self._following(name):
                self._layer = ""

    def _following(self, name: str) -> str:
        place = self.layers.index(name) + 1
        return self.layers[place].rpartition(".")[0] if place < len(self.layers) else ""

    def event(self, func: Any, args: Any, result: Any, now: int) -> None:
        """An operation is done."""
        if not self._layer:
            return
        matrix = int8 = 0
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        made = isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in self._matrices
        for each in tensors if made else ():
            if size := self._matrices.get(each.untyped_storage()._cdata):
                inputs = sum(other.numel() for other in tensors) - each.numel()
                matrix, int8 = size, _FLOAT32 * result.numel() + inputs
        self._events.append(_Event(self._layer, self._stack[-1] if self._stack else "", str(func), now, matrix, int8))

    def run(self, cache: Any, kept: Sequence[Any], call: Callable[[], Any]) -> tuple[list[_Event], Any]:
        """The events of a call, less weights and caches as the event's layer leaves them; and what the call gave.

        Args:
            cache: of the model, None without one. Those of later layers have not grown yet: of the last layer of each
                kind, which needs most, that is exact.
            kept: further tensors that are there from the start.
            call: runs the model.
        """
        self._events, self._layer, self._stack, self.cache, self._done = [], "", [], cache, {}
        alive = _Alive(self)
        alive.add_all((*self.model.parameters(), *self.model.buffers()))
        weights = alive.now
        alive.add_all((*kept, *_cache_tensors(cache)))
        with LikeCuda(), alive:
            answer = call()
        events = [replace(each, alive=each.alive - weights - self._done[each.layer]) for each in self._events]
        return events, answer


def measure_model(
    built: Any, lists: Sequence[Layers], quantisable: Set[str] = frozenset(), *, peaks: bool = True
) -> Measured:
    """Runs the first layers of a model, as many as it takes to have each kind of them.

    Args:
        built: the model on the meta device.
        lists: its lists of layers, in the order of their names.
        quantisable: names of weights that bitsandbytes turns into codes.
        peaks: False for the order of calls and the caches alone, which two runs tell.
    """
    step = step_of(built, lists, quantisable)
    sizes = [(batch, tokens) for batch, tokens in product(_BATCHES, (step, 2 * step, 3 * step))]
    if not peaks:
        two = _runs(built, lists, quantisable, torch.bfloat16, sizes[:2])
        return Measured(two[0].called, _caches(two), {})
    check = (_BATCHES[-1] + 1, 2 * step + step // 3 + 1)
    half = _runs(built, lists, quantisable, torch.bfloat16, [*sizes, check])
    whole = _runs(built, lists, quantisable, torch.float32, sizes)
    *fitted, checked = half
    found = {name: _peaks(name, fitted, whole, checked) for name in _measured(fitted)}
    return Measured(fitted[0].called, _caches(fitted), found)


def _loops(built: Any, lists: Sequence[Layers], quantisable: Set[str]) -> bool:
    """Whether layers compute token by token, as code for states does without kernels of its own: a length that has
    many tokens costs much then, and tells no more than a short one."""
    (short,) = _runs(built, lists, quantisable, torch.bfloat16, [(_BATCHES[0], _SHORT)])
    if len(short.prompt) < _MANY * len({each.layer for each in short.prompt}):
        return False
    (long,) = _runs(built, lists, quantisable, torch.bfloat16, [(_BATCHES[0], 2 * _SHORT)])
    return len(long.prompt) > 1.6 * len(short.prompt)


def step_of(built: Any, lists: Sequence[Layers], quantisable: Set[str]) -> int:
    """Tokens between the lengths that are run: three of them fit into windows and positions; few where code loops."""
    step = _step(built.config.get_text_config())
    return _SHORT if step > _SHORT and _loops(built, lists, quantisable) else step


def _step(text: Any) -> int:
    chunk = next((n for name in ("chunk_size", "mamba_chunk_size") if type(n := getattr(text, name, None)) is int), 0)
    step = chunk if 64 <= chunk <= 1024 else _STEP
    bounds = [getattr(text, name, None) for name in ("sliding_window", "max_position_embeddings", "attention_window")]
    bound = min((each for each in bounds if type(each) is int and each >= 32), default=1 << 30)
    while 3 * step + 2 > bound and step > 8:
        step //= 2
    return step


def _runs(
    built: Any, lists: Sequence[Layers], quantisable: Set[str], dtype: torch.dtype, sizes: Sequence[tuple[int, int]]
) -> list[_Run]:
    names = measured_layers(lists)
    with fake_tensors(), torch.no_grad():
        model = first_layers(built, lists, dtype).eval()
        found = []
        for batch, tokens in sizes:
            trace = _Trace(model, names, quantisable)
            run = _Run(batch, tokens)
            with trace.hooks():
                (_with_encoder if model.config.is_encoder_decoder else _run_padded)(model, trace, run)
            run.called = list(trace.called)
            found.append(run)
    return found


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors without storage that know their shapes, in operations that transformers has for all of them."""
    with FakeTensorMode(allow_non_fake_inputs=True), _any_grouped_product():
        yield


def first_layers(built: Any, lists: Sequence[Layers], dtype: torch.dtype) -> Any:
    """A copy of the model with as many layers as it takes to have each kind of them, of fake tensors.

    Called under ``fake_tensors``. A copy costs a tenth of building the model once more, all of whose layers would be
    made to be dropped.
    """
    whole = {layers.path: built.get_submodule(layers.path) for layers in lists}
    try:
        for layers in lists:
            _replace(built, layers.path, nn.ModuleList(list(whole[layers.path])[: layers.kept]))
        values = tree_leaves([vars(each) for each in built.modules()])
        fake = {id(each): _fake_like(each, dtype) for each in values if isinstance(each, torch.Tensor)}
        model = copy.deepcopy(built, fake)
    finally:
        for path, layers in whole.items():
            _replace(built, path, layers)
    model.config.dtype = dtype
    return model


def _replace(model: Any, path: str, module: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the same shape; what is kept in float32 stays so, the rest is of ``dtype``."""
    fake = torch.empty(tensor.shape, dtype=dtype if tensor.dtype == torch.bfloat16 else tensor.dtype)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def measured_layers(lists: Sequence[Layers]) -> list[str]:
    """Names of the layers that such a model has."""
    return [f"{layers.path}.{n}" for layers in lists for n in range(layers.kept)]


@contextmanager
def _any_grouped_product() -> Iterator[None]:
    """Torch's grouped product of experts is known for fake tensors of bfloat16 alone; transformers' own stand-in has
    the same result, and is known for all."""
    try:
        from transformers.integrations import moe
    except ImportError:
        yield
        return
    own = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = own


def _run_padded(model: Any, trace: _Trace, run: _Run) -> None:
    """A padded batch of prompts, then one more token; of an encoder the prompts alone."""
    from transformers import DynamicCache

    known = set(inspect.signature(model.forward).parameters)
    ids = torch.zeros(run.batch, run.tokens + 1, dtype=torch.long)
    mask = torch.ones(run.batch, run.tokens + 1, dtype=torch.long)
    name = next((each for each in ("past_key_values", "cache_params") if each in known), None)
    generates = model.get_output_embeddings() is not None and name is not None
    cache = DynamicCache(config=model.config) if generates else None

    def call(part: slice, seen: int) -> Any:
        places = (mask[:, :seen].cumsum(-1) - 1)[:, part]
        options = {
            "attention_mask": mask[:, :seen],
            "position_ids": places,
            "logits_to_keep": 1,
            "use_cache": generates,
        }
        chosen = {key: value for key, value in options.items() if key in known}
        if generates and name is not None:
            chosen[name] = cache
        return model(input_ids=ids[:, part], **chosen)

    run.prompt, _ = trace.run(cache, (ids, mask), lambda: call(slice(0, run.tokens), run.tokens))
    _note_caches(trace, run, cache)
    if generates:
        _note_states(model, trace.layers, run)
        more = slice(run.tokens, None)
        run.token, _ = trace.run(cache, (ids, mask), lambda: call(more, run.tokens + 1))


def _with_encoder(model: Any, trace: _Trace, run: _Run) -> None:
    """The encoder reads; the decoder computes its first token, and one more when it has as many as the encoder read."""
    from transformers import DynamicCache, EncoderDecoderCache

    ids = torch.zeros(run.batch, run.tokens, dtype=torch.long)
    mask = torch.ones(run.batch, run.tokens, dtype=torch.long)
    run.prompt, read = trace.run(None, (ids, mask), lambda: model.get_encoder()(input_ids=ids, attention_mask=mask))
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))

    def call(some: Any) -> Any:
        return model(
            encoder_outputs=read, attention_mask=mask, decoder_input_ids=some, past_key_values=cache, use_cache=True
        )

    alive = (ids, mask, read.last_hidden_state)
    first, _ = trace.run(cache, alive, lambda: call(ids[:, :1]))
    run.prompt += first
    _note_caches(trace, run, cache)
    trace.run(cache, alive, lambda: call(ids))
    run.token, _ = trace.run(cache, alive, lambda: call(ids[:, :1]))


# --- caches --------------------------------------------------------------------------------------------------------


def _cache_layers(cache: Any) -> Iterator[tuple[str, int, Any]]:
    parts = {"": cache}
    if hasattr(cache, "cross_attention_cache"):
        parts = {"": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    for kind, part in parts.items():
        for number, layer in enumerate(getattr(part, "layers", ())):
            yield kind, number, layer


def _tensors_of(layer: Any) -> Iterator[torch.Tensor]:
    seen = set()
    for leaf in tree_leaves(list(vars(layer).values())):
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in seen:
            seen.add(leaf.untyped_storage()._cdata)
            yield leaf


def _cache_tensors(cache: Any) -> Iterator[torch.Tensor]:
    for _, _, layer in _cache_layers(cache):
        yield from _tensors_of(layer)


def _cache_sizes(cache: Any) -> dict[tuple[str, int], int]:
    """Bytes of each layer of a cache."""
    return {
        (kind, number): sum(each.untyped_storage().nbytes() for each in _tensors_of(layer))
        for kind, number, layer in _cache_layers(cache)
    }


def _note_caches(trace: _Trace, run: _Run, cache: Any) -> None:
    """What each layer has put into the cache."""
    for kind, number, layer in _cache_layers(cache):
        owner = trace.owners.get((kind, number))
        if owner is None:
            continue
        sizes = [(kind, t.element_size(), t.untyped_storage().nbytes() // t.element_size()) for t in _tensors_of(layer)]
        run.caches.setdefault(owner, []).extend(sizes)
        if getattr(layer, "is_sliding", False) is True and type(getattr(layer, "sliding_window", None)) is int:
            run.windows[owner] = layer.sliding_window


def _note_states(model: Any, names: Sequence[str], run: _Run) -> None:
    """States that modules keep for themselves, as attributes that are neither parameters nor buffers."""
    for name in names:
        for module in model.get_submodule(name).modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor) and value.shape[:1] == (run.batch,):
                    run.caches.setdefault(name, []).append(("", value.element_size(), value.numel()))


def _caches(runs: Sequence[_Run]) -> dict[str, LayerCache]:
    """Numbers for each token and for each sequence, from two lengths of the same batch."""
    short, long = runs[0], runs[1]
    found = {}
    for name, sizes in short.caches.items():
        tokens = crossing = states = states_fp32 = 0
        for (kind, number, few), (_, _, many) in zip(sizes, long.caches[name], strict=True):
            each = (many - few) // (short.batch * (long.tokens - short.tokens))
            rest = few // short.batch - each * short.tokens
            wide = number > 2
            if kind == "cross":
                crossing += each
            else:
                if each == 0 and short.tokens > 1:
                    states, states_fp32 = states + (0 if wide else rest), states_fp32 + (rest if wide else 0)
                else:
                    tokens += each * (2 if wide else 1)
        if "cross" in {kind for kind, _, _ in sizes}:  # its own start from one token
            tokens, states, states_fp32 = states + tokens, 0, 0
        found[name] = LayerCache(tokens, short.windows.get(name), states, states_fp32, crossing)
    return found


# --- curves --------------------------------------------------------------------------------------------------------


def _measured(runs: Sequence[_Run]) -> list[str]:
    return list(dict.fromkeys(each.layer for each in [*runs[0].prompt, *runs[0].token]))


def _peaks(name: str, half: Sequence[_Run], whole: Sequence[_Run], check: _Run) -> Peaks:
    prompt, token = _phase(name, half, whole, "prompt"), _phase(name, half, whole, "token")
    fill, times = _fill(prompt["16"], [each.alive for each in check.prompt if each.layer == name], check)
    more = _more(token["16"], [each.alive for each in check.token if each.layer == name], check.batch, check.tokens + 1)
    return Peaks(_scaled(prompt, times), _scaled(token, more), fill)


def _phase(name: str, half: Sequence[_Run], whole: Sequence[_Run], phase: str) -> dict[str, tuple[Curve, ...]]:
    """Curves of one layer in one phase: plain ones in 16 and in 32 bits, and with bitsandbytes' products."""
    later = 1 if phase == "token" else 0
    traces = [[each for each in getattr(run, phase) if each.layer == name] for run in half]
    wide = [[each for each in getattr(run, phase) if each.layer == name] for run in whole]
    sizes = [(run.batch, run.tokens + later) for run in half]
    return {
        "16": _curves(sizes, traces, lambda each: each.alive, matrices=False),
        "32": _curves(sizes, wide, lambda each: each.alive, matrices=False),
        "int8": _curves(sizes, traces, lambda each: each.alive + each.int8, matrices=False),
        "4bit": _curves(sizes, traces, lambda each: each.alive, matrices=True),
    }


def _curves(
    sizes: Sequence[tuple[int, int]],
    traces: Sequence[Sequence[_Event]],
    value: Callable[[_Event], int],
    *,
    matrices: bool,
) -> tuple[Curve, ...]:
    """The polynomials of all operations that are somewhere the largest."""
    if not traces[0]:
        return ()
    places = [[each.place for each in trace] for trace in traces]
    rows: list[tuple[int, list[int]]]
    if all(each == places[0] for each in places):
        rows = [(each[0].matrix, [value(one) for one in each]) for each in zip(*traces, strict=True)]
    else:  # loops over tokens or chunks: the most of each operation in each module, of those that all sizes have
        most: dict[Any, list[int]] = {place: [0] * len(traces) for place in set(places[0]).intersection(*places)}
        for number, trace in enumerate(traces):
            for each in trace:
                if row := most.get(each.place):
                    row[number] = max(row[number], value(each))
        rows = [(place[3], row) for place, row in sorted(most.items())]
    return _largest([_fit(sizes, row, matrix if matrices else 0) for matrix, row in rows])


def _fit(sizes: Sequence[tuple[int, int]], row: Sequence[int], matrix: int) -> Curve:
    """The polynomial through the values at two batches and three equally distant lengths."""
    at = dict(zip(sizes, row, strict=True))
    one, two = sorted({batch for batch, _ in sizes})
    lengths = sorted({tokens for _, tokens in sizes})
    each = [(at[two, tokens] - at[one, tokens]) / (two - one) for tokens in lengths]
    once = [at[one, tokens] - one * slope for tokens, slope in zip(lengths, each, strict=True)]
    return Curve(quadratic(lengths, once), quadratic(lengths, each), matrix)


def quadratic(at: Sequence[int], values: Sequence[float]) -> Polynomial:
    """The polynomial through the values at three equally distant places."""
    (x, y, _), (a, b, c) = at, values
    step = y - x
    second = (c - 2 * b + a) / (2 * step * step)
    first = (b - a) / step - second * (x + y)
    rest = a - first * x - second * x * x
    rounded = [round(each, 6) for each in (rest, first, second)]
    tidy = [int(each) if each == int(each) else each for each in rounded]
    return tidy[0], tidy[1], tidy[2]


def _at(curve: Curve, batch: int, tokens: int) -> int:
    fixed, each = curve.at(tokens)
    return fixed + batch * each


def _largest(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Those that are the largest somewhere; of 4-bit weights each matrix counts as it is unpacked."""
    found: dict[Curve, None] = {}
    distinct = list(dict.fromkeys(curves))
    for batch, tokens in _GRID:
        found.setdefault(max(distinct, key=lambda curve: _at(curve, batch, tokens) + 2 * curve.matrix))
    return tuple(found)


def _most(curves: Sequence[Curve], batch: int, tokens: int) -> int:
    return max((_at(curve, batch, tokens) for curve in curves), default=0)


def _fill(curves: Sequence[Curve], real: Sequence[int], run: _Run) -> tuple[int, float]:
    """To how many tokens prompts are filled up, as a size that is no multiple tells; and what is missing even so."""
    most = max(real, default=0)
    for fill in _FILLS:
        filled = -(-run.tokens // fill) * fill
        if most <= _most(curves, run.batch, filled):
            return fill, 1.0
    return _FILLS[-1], _more(curves, real, run.batch, -(-run.tokens // _FILLS[-1]) * _FILLS[-1])


def _more(curves: Sequence[Curve], real: Sequence[int], batch: int, tokens: int) -> float:
    """By how much the curves must grow to cover a size; 1 where they do."""
    ours = _most(curves, batch, tokens)
    return max(1.0, max(real, default=0) / ours) if ours > 0 else 1.0


def _scaled(phases: Mapping[str, tuple[Curve, ...]], times: float) -> Mapping[str, tuple[Curve, ...]]:
    if times <= 1.0:
        return phases

    def grown(curve: Curve) -> Curve:
        once, each = ([round(max(part, 0) * times, 3) for part in some] for some in (curve.once, curve.each))
        return Curve((once[0], once[1], once[2]), (each[0], each[1], each[2]), curve.matrix)

    return {key: tuple(grown(curve) for curve in curves) for key, curves in phases.items()}
