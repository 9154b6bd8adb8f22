"""Collectives that end on every rank when one rank fails.

A rank that fails writes why to the group's store and raises. The others wait for collectives in slices of half a second
and look at the store between them, so that they raise PeerError with that rank's number and message; a rank that is gone
without a word is noticed by a broken connection or, at the latest, when `timeout` is over, and named by a roll call of
those who are left. On CUDA, where a wait only orders streams, ``finish`` is the wait that raises. After a failure every
further call raises at once: the group is not usable again.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_SLICE = 0.5  # seconds between looks at the store
_ROLL_CALL = 5.0  # seconds that survivors have to say that they are there; only the message depends on it


class PeerError(RuntimeError):
    """Another rank failed, or did not answer in time; the text names it and, where it said so, why."""


class Pending:
    """A collective under way."""

    def __init__(self, peers: Peers, work: Any, result: torch.Tensor) -> None:
        self._peers, self._work, self._result = peers, work, result

    def wait(self) -> torch.Tensor:
        """The result; on CUDA for work of the current stream. PeerError if another rank failed."""
        if self._work is not None:
            self._peers._wait(self._work)
            self._work = None
        return self._result


class Peers:
    """The ranks of a process group (default: all). timeout: seconds until a rank that does not answer counts as failed; the
    group's own timeout should not be shorter. store: where failures are told (default: torch.distributed's)."""

    def __init__(self, group: Any = None, *, timeout: float = 60.0, store: Any = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.timeout = timeout
        self.is_nccl = dist.get_backend(self.group) == "nccl"
        name = "-".join(map(str, dist.get_process_group_ranks(self.group)))
        base = dist.distributed_c10d._get_default_store() if store is None else store
        self._store = dist.PrefixStore(f"libkda/{name}", base)
        self._failure: str | None = None

    # -- collectives --------------------------------------------------------------------------------------------------

    def gather(self, tensor: torch.Tensor) -> Pending:
        """[ranks, *shape] of every rank's tensor, which must have one shape on all of them."""
        result, mine = tensor.new_empty(self.ranks, *tensor.shape), tensor.contiguous().view(-1)
        return self._start(lambda: dist.all_gather_into_tensor(result.view(-1), mine, group=self.group, async_op=True), result)

    def add(self, tensor: torch.Tensor) -> Pending:
        """The sum over ranks, in place; the same bits on every rank."""
        return self._start(lambda: dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def _start(self, collective: Callable[[], Any], result: torch.Tensor) -> Pending:
        self.check()
        try:
            return Pending(self, collective(), result)
        except RuntimeError as error:
            raise self._gone(str(error)) from error

    def _wait(self, work: Any) -> None:
        if self.is_nccl:
            work.wait()  # orders streams
            return
        deadline = time.monotonic() + self.timeout
        while not work.is_completed():
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._gone(f"no answer within {self.timeout:g} s")
            try:
                # Below a millisecond it would become 0, which means for ever.
                work.wait(datetime.timedelta(seconds=max(0.01, min(_SLICE, left))))
            except RuntimeError as error:
                if work.is_completed():
                    raise self._gone(str(error)) from error
                self._look()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._gone(str(error)) from error

    def finish(self) -> None:
        """Waits until what was put on the current stream is done, and raises PeerError if a rank failed before. On the CPU
        nothing is left to wait for."""
        self.check()
        if not self.is_nccl:
            return
        event = torch.cuda.Event()
        event.record()
        deadline, look = time.monotonic() + self.timeout, time.monotonic() + _SLICE
        while not event.query():
            now = time.monotonic()
            if now > deadline:
                raise self._gone(f"no answer within {self.timeout:g} s")
            if now > look:
                self._look()
                look = now + _SLICE
            time.sleep(2e-5)

    # -- failures -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Around what a rank does between collectives: an exception is told to the other ranks, which then raise too."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            self.tell(f"{type(error).__name__}: {error}")
            raise

    def tell(self, message: str) -> None:
        """Says that this rank failed."""
        self._failure = f"rank {self.rank} failed: {message}"
        with contextlib.suppress(Exception):  # the store may be gone too
            if not self._store.check(["failed"]):
                self._store.set("failed", self._failure)
        self._abort()

    def check(self) -> None:
        """Raises PeerError if a failure is known here; asks nobody."""
        if self._failure is not None:
            raise PeerError(self._failure)

    def _look(self) -> None:
        try:
            told = self._store.check(["failed"])
            message = self._store.get("failed").decode() if told else ""
        except Exception as error:
            raise self._gone(f"the store of the process group is gone: {error}") from error
        if told:
            raise self._gone(message)

    def _gone(self, reason: str) -> PeerError:
        """The error of a collective that did not come about."""
        try:
            if self._store.check(["failed"]):
                message = self._store.get("failed").decode()
            else:
                self._store.set("failed", reason)
                message = reason
            if not message.startswith("rank "):
                message = f"{self._roll_call()}: {message}"
        except Exception:
            message = reason
        self._failure = message
        self._abort()
        return PeerError(message)

    def _roll_call(self) -> str:
        self._store.set(f"here/{self.rank}", "1")
        deadline = time.monotonic() + _ROLL_CALL
        while True:
            missing = [r for r in range(self.ranks) if not self._store.check([f"here/{r}"])]
            if len(missing) <= 1 or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return f"rank {', '.join(map(str, missing))} does not answer" if missing else "a collective failed"

    def _abort(self) -> None:
        # A communicator with a collective that never ends would hang in its own destructor.
        if self.is_nccl:
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group(self.group)
