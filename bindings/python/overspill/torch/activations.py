"""What autograd saves for the backward, kept in the engine's activation store until then.

A storage goes there as a whole, once, however many saved tensors are views of it, and comes back
with the first of them. The engine holds the newest ones in host memory; the backward wants these
first, and fetches a few ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..engine import Engine
from .saved import SavedTensor, save

SMALLEST_BYTES = 64 << 10  # smaller ones stay: a call costs more than they do
_AHEAD = 8  # storages that are fetched before they are wanted


class _Stored:
    """A storage that is in the engine, or has come back from there."""

    def __init__(
        self, storage: torch.UntypedStorage, version: int, forward: int, number: int, place: int,
        dropped: deque[tuple[int, int | None, int]],
    ) -> None:  # fmt: skip
        self.source = StorageWeakRef(storage)  # keeps its key from being another storage's
        self.key = int(storage._cdata)
        self.version = version
        self.forward = forward  # in which it was saved
        self.nbytes = int(storage.nbytes())
        self.number: int | None = number  # the engine's, until it comes back
        self.place = place  # in the order of saving
        self.fetched = False
        self.restored: torch.UntypedStorage | None = None
        self._dropped = dropped

    def __del__(self) -> None:
        # Runs in any thread, at any moment: the engine is told by a later call.
        self._dropped.append((self.key, self.number, self.place))


@dataclass(frozen=True)
class _View:
    """What autograd keeps in a tensor's place."""

    stored: _Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Activations:
    """Hooks for saved tensors that move them to the engine. Thread-safe."""

    def __init__(
        self, engine: Engine, device: torch.device, stream: Callable[[], int], host_bytes: int
    ) -> None:
        self._engine = engine
        self._device = device
        self._stream = stream
        self._ahead_bytes = host_bytes // 2
        self._lock = threading.RLock()
        self._kept: set[int] = set()
        self._by_storage: dict[int, weakref.ref[_Stored]] = {}
        self._by_place: dict[int, weakref.ref[_Stored]] = {}
        self._dropped: deque[tuple[int, int | None, int]] = deque()
        self._next_place = 0
        self._forward = 0

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Names tensors whose memory stays in use all the same: a model's buffers."""
        self._kept = {storage.data_ptr() for t in tensors if (storage := _storage_of(t))}

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        with self._lock:
            self._forward += 1

    def pack(self, tensor: torch.Tensor) -> _View | SavedTensor:
        """What autograd keeps; throws the engine's Error(DOES_NOT_FIT) when its stores are full."""
        storage = _storage_of(tensor)
        if storage is None or not self._moves(tensor, storage):
            return save(tensor)
        with self._lock:
            self._discard_dropped()
            stored = self._find(storage, tensor) or self._save(storage, tensor._version)
        return _View(
            stored, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(self, saved: _View | SavedTensor) -> torch.Tensor:
        if isinstance(saved, SavedTensor):
            return saved.get()
        with self._lock:
            storage = saved.stored.restored
            if storage is None:
                storage = self._restore(saved.stored)
        empty = torch.empty(0, dtype=saved.dtype, device=self._device)
        return empty.set_(storage, saved.offset, saved.size, saved.stride)

    def _moves(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        if type(tensor) is not torch.Tensor or tensor.device != self._device:
            return False
        if storage.nbytes() < SMALLEST_BYTES or storage.data_ptr() in self._kept:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return False
        if tensor.requires_grad:
            return not tensor.is_leaf  # the caller has leaves
        # A small part of what is not the graph's, such as a batch of a whole data set.
        return 2 * tensor.numel() * tensor.element_size() >= storage.nbytes()

    def _find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> _Stored | None:
        reference = self._by_storage.get(int(storage._cdata))
        stored = reference() if reference is not None else None
        if stored is None or stored.version != tensor._version:
            return None
        # What is not a graph's may be filled anew by others than PyTorch, which counts no version.
        same = tensor.requires_grad or stored.forward == self._forward
        return stored if same and stored.nbytes == storage.nbytes() else None

    def _save(self, storage: torch.UntypedStorage, version: int) -> _Stored:
        number = self._engine.save_activation(self._bytes_of(storage), self._stream())
        stored = _Stored(storage, version, self._forward, number, self._next_place, self._dropped)
        self._next_place += 1
        self._by_storage[stored.key] = self._by_place[stored.place] = weakref.ref(stored)
        return stored

    def _restore(self, stored: _Stored) -> torch.UntypedStorage:
        assert stored.number is not None
        storage = torch.empty(stored.nbytes, dtype=torch.uint8, device=self._device)
        self._engine.restore_activation(stored.number, storage, self._stream())
        stored.number = None
        stored.restored = storage.untyped_storage()
        self._fetch_before(stored.place)
        return stored.restored

    def _fetch_before(self, place: int) -> None:
        """Fetches what was saved just before, as far as half of the host memory holds it."""
        room = self._ahead_bytes
        for earlier in range(place - 1, place - 1 - _AHEAD, -1):
            reference = self._by_place.get(earlier)
            stored = reference() if reference is not None else None
            if stored is None or stored.number is None:
                continue
            room -= stored.nbytes
            if room < 0:
                return
            if not stored.fetched:
                stored.fetched = True
                self._engine.prefetch_activation(stored.number)

    def _discard_dropped(self) -> None:
        while self._dropped:
            key, number, place = self._dropped.popleft()
            self._by_place.pop(place, None)
            reference = self._by_storage.get(key)
            if reference is not None and reference() is None:
                del self._by_storage[key]
            if number is not None:
                self._engine.discard_activation(number)

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None for sparse, functional and other tensors without a storage of their own."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
