"""Ranks in forked children of a test: each joins a process group over loopback and does what the test says."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from populora_trainer.ranks.group import Group, joined
from populora_trainer.ranks.world import World, world_from

Task = Callable[[Group], Any]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun gives to a process of one node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class Crew:
    """As many ranks as were asked for, until `close`."""

    def __init__(self, size: int, tasks: dict[str, Callable[..., Any]]) -> None:
        self.size = size
        context = multiprocessing.get_context("fork")
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, theirs, tasks), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, task: str, *arguments: Sequence[Any]) -> list[Any]:
        """Let every rank do a task, with the argument of its number, and return their answers."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((task, [of_rank[rank] for of_rank in arguments]))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def same(self, task: str, *arguments: Any) -> list[Any]:
        """Let every rank do a task with the same arguments."""
        return self.ask(task, *([argument] * self.size for argument in arguments))

    def close(self) -> None:
        # Later children hold the pipes of earlier ones too: closing them would tell nobody.
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def _work(rank: int, size: int, port: int, pipe: Connection, tasks: dict[str, Callable[..., Any]]) -> None:
    # The parent's OpenMP threads did not come along; one thread needs none.
    torch.set_num_threads(1)
    os.environ.update(torchrun_variables(rank, size, port))
    world: World = world_from(os.environ)
    with joined(world, on_gpus=False) as group:
        while True:
            message = pipe.recv()
            if message is None:
                break
            task, arguments = message
            try:
                pipe.send(tasks[task](group, *arguments))
            except Exception as error:
                pipe.send(error)
    os._exit(0)
