"""Devices without GPUs whose replays run at the same time, in Triton's interpreter: one step on each in turn.

A step of a device runs until it exchanges something, then that of the next device. So all devices have made
their part before any reads it. The interpreter does not wait, so flags are raised and sums sent before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from interpreted_device import InterpretedDevice

from drift_sdk._kernels.exchange import PeerMemory, PeerSums, PeerTensor
from drift_sdk.execution.device import exchange
from drift_sdk.execution.forward import forward_pass
from drift_sdk.execution.rounds import round as round_module

__all__ = ["Lockstep", "LockstepDevice", "LockstepReplay"]


class Lockstep:
    """Devices that launch every replay together.

    num_exchanges: of all devices so far. is_last_silent: flags and sums of the last device come too late.
    """

    def __init__(self, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = [LockstepDevice(self, rank) for rank in range(num_devices)]
        self.blocks: list[torch.Tensor] = []
        self.num_exchanges = 0
        self.is_last_silent = False
        self._pending: list[Callable[[], None]] = []
        self._turns = [threading.Semaphore(0) for _ in self.devices]
        self._errors: list[BaseException] = []
        self._is_running = False
        patch = monkeypatch.setattr
        for module, name in (
            (forward_pass, "add_norm_across"),
            (round_module, "gather_logits"),
            (exchange, "begin_exchange"),
            (exchange, "share_drafts"),
        ):
            patch(module, name, self._meeting(getattr(module, name)))

    def launch(self, step: Callable[[], None]) -> None:
        """Run a step on each device once the last one launches it."""
        self._pending.append(step)
        if len(self._pending) < len(self.devices):
            return

        steps, self._pending = self._pending, []
        self._turns = [threading.Semaphore(0) for _ in self.devices]
        threads = [threading.Thread(target=self._run, args=(rank, each)) for rank, each in enumerate(steps)]
        self._is_running = True
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        self._is_running = False
        if self._errors:
            raise self._errors[0]

    def _run(self, rank: int, step: Callable[[], None]) -> None:
        self._turns[rank].acquire()
        try:
            if self._errors:
                return

            with torch.inference_mode():
                step()
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._turns[(rank + 1) % len(self._turns)].release()

    def _meeting(self, launch: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: object, **options: object) -> None:
            if self._is_running:
                self._meet(*arguments)
            launch(*arguments, **options)

        return wrapped

    def _meet(self, *arguments: object) -> None:
        """Send what this device has for an exchange, or raise its flag, and let the others come as far."""
        self.num_exchanges += 1
        for argument in arguments:
            if isinstance(argument, PeerSums):
                memory, first, size = (
                    argument.memory,
                    argument.memory.offset(argument.own),
                    argument.own.nbytes,
                )
                changed = slice(first, first + size)
                numbers = argument.own.flatten()
                value = torch.where(numbers.isnan(), torch.nan, numbers).view(torch.uint8)
                break

            if isinstance(argument, PeerTensor | PeerMemory):
                is_beginning = isinstance(argument, PeerMemory)
                memory = argument if is_beginning else argument.memory
                flag = arguments[1] if is_beginning else argument.flag
                first = 4 * (memory.rank * memory.flags.shape[1] + flag)
                changed, value = slice(first, first + 4), (memory.epoch + is_beginning).view(torch.uint8)
                break

        rank = memory.rank
        if rank + 1 < len(self.devices) or not self.is_last_silent:
            for block in self.blocks:
                block[changed] = value
        self._turns[(rank + 1) % len(self._turns)].release()
        self._turns[rank].acquire()
        if self._errors:
            raise RuntimeError("another device failed")


class LockstepReplay:
    def __init__(self, group: Lockstep, step: Callable[[], None]) -> None:
        self._group, self._step = group, step

    def launch(self) -> None:
        self._group.launch(self._step)

    def close(self) -> None:
        pass


class LockstepDevice(InterpretedDevice):
    """A device whose memory the others read and write.

    is_closed: whether it was closed.
    """

    def __init__(self, group: Lockstep, rank: int) -> None:
        self._group, self.rank = group, rank
        self.is_closed = False

    def mapped_memory(self, num_bytes: int, peers: Sequence[torch.device]) -> torch.Tensor:
        block = torch.zeros(num_bytes, dtype=torch.uint8)
        self._group.blocks.append(block)
        return block

    def capture(self, step: Callable[[], None]) -> LockstepReplay:
        return LockstepReplay(self._group, step)

    def close(self) -> None:
        self.is_closed = True
