"""Prompts that are answered together, each in a slot of one fixed cache of keys and values.

A prompt's keys begin at the first column of its slot, so rows need no padding, join and leave without the
others being copied, and a step writes one column in place. On a GPU, steps are captured as CUDA graphs, and
the next one is started before the tokens of the last have arrived.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import AttentionInterface

from kindler.frameworks.torch.prompts import Choice, Chosen, Prompt, context_of, ends_of, on_device
from kindler.types import Sampling

_ROWS, _ROWS_ON_GPU = 64, 256  # prompts that are answered at the same time
_TOKENS = 16_384  # of prompts that are computed in one pass
_MEMORY = 0.6  # of what is free on a GPU, for keys and values
_WIDTHS = 128  # columns by which a captured step is wider than the one before
_GROUPED = "kindler_grouped"


@dataclass
class _Now:
    """What the layers are to do in this pass: put prompts into `slots`, or add a column at `positions`."""

    slots: torch.Tensor | None
    rows: torch.Tensor
    positions: torch.Tensor
    width: int


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.now: Any = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        now: _Now = self.now
        if now.slots is not None:
            width = key_states.shape[2]
            self.keys[now.slots, :, :width] = key_states
            self.values[now.slots, :, :width] = value_states
            return key_states, value_states
        self.keys[now.rows, :, now.positions] = key_states[:, :, 0]
        self.values[now.rows, :, now.positions] = value_states[:, :, 0]
        rows = len(key_states)
        return self.keys[:rows, :, : now.width], self.values[:rows, :, : now.width]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return int(self.now.width), 0

    def get_seq_length(self, *_: Any) -> int:
        return 0 if self.now.slots is not None else int(self.now.width) - 1

    def lazy_initialization(self, *_: Any) -> None:
        pass

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class Slots:
    """An `Engine` for decoders that take positions and keep plain keys and values."""

    def __init__(self, model: Any, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._precision, self._ends = model, precision, ends_of(model)
        self._device = model.device
        self._on_gpu = self._device.type == "cuda"
        self._limit = _ROWS_ON_GPU if self._on_gpu else _ROWS
        self._ahead = 1 if self._on_gpu else 0
        self._context = (context_of(model) or 1 << 40) - 1
        self._narrow = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._eager = model.config._attn_implementation == "eager"
        pad = getattr(model.config, "pad_token_id", None)
        self._fill = 1 if pad == 0 else 0  # models warn of their own padding
        self._rows: list[Prompt] = []
        self._waiting: list[Prompt] = []
        self._under_way: deque[Chosen] = deque()
        self._choice: Choice | None = None
        self._width = 0
        self._graphs: dict[tuple[Any, ...], Any] = {}
        self._pool: Any = None
        self._aside: Any = None
        self._can_capture = self._on_gpu
        self._cache: Any = None
        self._shapes: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of a row
        self._logits = self._last = self._positions = torch.empty(0)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, precision: Callable[[], AbstractContextManager[Any]]) -> Slots | None:
        """None for models whose rows cannot join and leave; that includes all that compute anything else."""
        config, taken = model.config, inspect.signature(model.forward).parameters
        if getattr(config, "is_encoder_decoder", False) or not {"position_ids", "past_key_values"} <= set(
            taken
        ):
            return None
        ids = torch.arange(4, device=model.device).unsqueeze(0) % config.get_text_config().vocab_size
        with precision():
            plain = model(input_ids=ids, use_cache=True)
            short = model(input_ids=ids[:, :2], use_cache=False).logits[0, -1]
        cache = plain.past_key_values
        if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return None
        made = cls(model, precision)
        made._shapes = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        made._logits = plain.logits[:1, -1]
        trial = [Prompt.of(0, ids[0, :n].tolist(), Sampling(), context=None) for n in (4, 2)]
        made._can_capture = False
        try:
            made.join(trial)
            found = made._computed(2, 4).float()
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
        expected = torch.stack([plain.logits[0, -1], short]).float()
        near = (1e-3 if plain.logits.dtype == torch.float32 else 5e-2) * float(expected.abs().max())
        made._rows, made._width, made._can_capture = [], 0, made._on_gpu
        return made if (found - expected).abs().max() <= near else None

    @property
    def running(self) -> int:
        return len(self._waiting) + sum(not prompt.done for prompt in self._rows)

    @property
    def room(self) -> int:
        return self._limit - self.running

    @property
    def enough(self) -> int:
        return max(1, self._limit // 8)

    def join(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        self._waiting += [prompt for prompt in prompts if not prompt.done]
        self._admit()
        return [prompt for prompt in prompts if prompt.done]

    @torch.inference_mode()
    def step(self) -> list[Prompt]:
        running = self.running
        if running < len(self._rows) and (not self._on_gpu or running * 4 <= len(self._rows) * 3):
            self._leave()
        if self._waiting:
            self._admit()
        if running:
            self._start()
        done: list[Prompt] = []
        # What a schema allows next depends on the token before.
        ahead = running and not any(prompt.matcher for prompt in self._rows)
        while len(self._under_way) > (self._ahead if ahead else 0):
            done += self._under_way.popleft().add(self._ends)
        return done

    def _start(self) -> None:
        """Begin to compute the next token of each row."""
        rows = len(self._rows)
        self._choice = self._choice or Choice(self._rows, self._device)
        width = max(len(prompt.tokens) + prompt.begun for prompt in self._rows)
        chosen = self._choice(self._computed(rows, min(width, self._width)))
        self._last[:rows] = chosen.tokens
        # Rows that are done, and have not left, have no more positions; what they compute is not used.
        self._positions[:rows] = (self._positions[:rows] + 1).clamp_(max=min(self._width - 1, self._context))
        self._under_way.append(chosen)

    @torch.inference_mode()
    def _admit(self) -> None:
        self._leave()
        self._waiting = [prompt for prompt in self._waiting if not prompt.done]
        if not self._waiting:
            return
        self._widen(1 + max(len(prompt.tokens) + prompt.most for prompt in self._waiting))
        first, most = len(self._rows), self._limit - len(self._rows)
        joining, self._waiting = self._waiting[:most], self._waiting[most:]
        if not joining:
            return
        self._rows, self._choice = self._rows + joining, None
        slots = slice(first, len(self._rows))
        self._last[slots] = self._long([prompt.tokens[-1] for prompt in joining])
        self._positions[slots] = self._long([len(prompt.tokens) - 1 for prompt in joining])
        while joining:
            width = max(len(prompt.tokens) for prompt in joining) - 1
            rows = max(1, _TOKENS // max(1, width))
            self._read(joining[:rows], first, width)
            joining, first = joining[rows:], first + rows

    def _leave(self) -> None:
        """The last rows move to the slots of those that are done."""
        kept = [row for row, prompt in enumerate(self._rows) if not prompt.done]
        if len(kept) == len(self._rows):
            return
        holes = [row for row in range(len(kept)) if self._rows[row].done]
        moved = [row for row in kept if row >= len(kept)]
        if holes:
            to, by = self._long(holes), self._long(moved)
            for tensor in (self._last, self._positions, *_tensors(self._cache)):
                tensor[to] = tensor[by]
        for hole, row in zip(holes, moved, strict=True):
            self._rows[hole] = self._rows[row]
        self._rows, self._choice = self._rows[: len(kept)], None

    def _widen(self, width: int) -> None:
        """Makes slots that hold `width` columns, with what the rows have in theirs."""
        if width <= self._width:
            return
        width = -(-width // _WIDTHS) * _WIDTHS if self._on_gpu else max(width, 2 * self._width)
        self._graphs.clear()
        if not self._rows:
            self._cache = None
        if self._on_gpu:
            self._limit = max(len(self._rows), 1, min(_ROWS_ON_GPU, self._affordable(width)))
        slots, rows = self._limit + 1, len(self._rows)  # the last is for rows that only fill a shape
        last, positions = self._long([0] * slots), self._long([0] * slots)
        cache = Cache(
            layers=[_Layer(*(_slots(part, slots, width) for part in pair)) for pair in self._shapes]
        )
        if rows:
            last[:rows], positions[:rows] = self._last[:rows], self._positions[:rows]
            for new, old in zip(_tensors(cache), _tensors(self._cache), strict=True):
                new[:rows, :, : self._width] = old[:rows]
        self._cache, self._last, self._positions, self._width = cache, last, positions, width
        self._columns, self._numbers = (torch.arange(n, device=self._device) for n in (width, slots))
        if self._on_gpu:
            self._logits = self._logits.new_empty((slots, self._logits.shape[1]))
            self._places, self._ids = (
                self._long([0] * _power(self._limit)),
                self._long([self._fill] * _TOKENS),
            )

    def _affordable(self, width: int) -> int:
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        row = sum(part[:, :1].nbytes for pair in self._shapes for part in pair) * width
        return int(free * _MEMORY / row)

    def _read(self, prompts: Sequence[Prompt], first: int, width: int) -> None:
        """Puts keys and values of all but the last token, whose turn is in the next step, into slots."""
        if not width:
            return
        rows, wide = len(prompts), width
        if captured := self._on_gpu and (rows * width <= _TOKENS // 4):
            rows, wide = _power(rows), -(-width // 16) * 16
        ids = np.full((rows, wide), self._fill)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.tokens) - 1] = prompt.tokens[:-1]
        slots = [first + row if row < len(prompts) else self._limit for row in range(rows)]
        if not captured:
            self._put(self._long(ids), self._long(slots))
            return
        held, places = self._ids[: rows * wide].view(rows, wide), self._places[:rows]
        held.copy_(self._long(ids))
        places.copy_(self._long(slots))
        self._captured(("read", rows, wide), lambda: self._put(held, places))

    def _put(self, ids: torch.Tensor, slots: torch.Tensor) -> None:
        width = ids.shape[1]
        self._pass(_Now(slots, slots, slots, width), ids, self._columns[:width].expand(len(ids), -1), None)

    def _computed(self, rows: int, width: int) -> torch.Tensor:
        """The logits of each row's next token."""
        if not self._on_gpu:
            return self._next(rows, width)
        rows, width = min(_power(rows), self._limit), min(-(-width // _WIDTHS) * _WIDTHS, self._width)
        self._captured(("step", rows, width), lambda: self._logits[:rows].copy_(self._next(rows, width)))
        return self._logits[:rows]

    def _next(self, rows: int, width: int) -> torch.Tensor:
        positions = self._positions[:rows]
        seen = (self._columns[:width] <= positions.unsqueeze(1))[:, None, None]
        if self._eager:
            least = torch.finfo(self._model.dtype).min
            seen = torch.zeros_like(seen, dtype=self._model.dtype).masked_fill(~seen, least)
        now = _Now(None, self._numbers[:rows], positions, width)
        with _grouped(self._model.config):
            return self._pass(now, self._last[:rows].unsqueeze(1), positions.unsqueeze(1), seen)

    def _pass(self, now: _Now, ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> torch.Tensor:
        for layer in self._cache.layers:
            layer.now = now
        narrow = {"logits_to_keep": 1} if self._narrow else {}
        with torch.inference_mode(), self._precision():
            made = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                **narrow,
            )
        logits: torch.Tensor = made.logits[:, -1]
        return logits

    def _captured(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> None:
        graph = self._graphs.get(key)
        if graph is None and self._can_capture:
            graph = self._capture(key, compute)
        if graph is None:
            compute()
        else:
            graph.replay()

    def _capture(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        here = torch.cuda.current_stream(self._device)
        if self._aside is None:  # one for all: each stream has memory of its own
            self._aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside = self._aside
        aside.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(aside):
            compute()  # which loads what it needs
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except RuntimeError:
                self._can_capture = False
            finally:
                with suppress(RuntimeError):
                    graph.capture_end()
        here.wait_stream(aside)
        if not self._can_capture:
            return None
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        return graph

    def _long(self, values: Any) -> torch.Tensor:
        return on_device(values, self._device)


def _power(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _slots(like: torch.Tensor, slots: int, width: int) -> torch.Tensor:
    return like.new_zeros((slots, like.shape[0], width, like.shape[2]))


@contextmanager
def _grouped(config: Any) -> Iterator[None]:
    """Releases of transformers before 5.20 copy all keys and values for each head of a group."""
    before = config._attn_implementation
    if before != "sdpa" or hasattr(sdpa_attention, "pack_gqa"):
        yield
        return
    AttentionInterface.register(_GROUPED, grouped_attention)
    config._attn_implementation = _GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token, with the heads of a group as rows."""
    rows, heads, _, width = query.shape
    packed = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    scale = options.get("scaling")
    made = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scale)
    return made.reshape(rows, 1, heads, value.shape[-1]), None
