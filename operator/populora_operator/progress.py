"""How far the trainer is: its `/status` over HTTP, and the scores that an evaluation leaves behind."""

import json
import logging
from collections.abc import Sequence
from typing import Annotated

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from populora_api.status import EvaluationResult
from populora_operator import names
from populora_operator.observed import Job, Observed, Pod

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 3.0
MAX_BYTES = 1 << 20
MAX_MEMBERS = 128

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class _Answer(BaseModel):
    """What the trainer says; fields that are not known here are left out, so that it may be newer."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", allow_inf_nan=False, frozen=True
    )


class Member(_Answer):
    """A member of the population."""

    name: str = Field(min_length=1, max_length=63)
    role: str
    generation: Count = 0
    mu: float
    sigma: float = Field(ge=0)
    lcb: float
    digest: str | None = Field(default=None, max_length=64)


class Best(_Answer):
    """The best-rated member of each role."""

    teacher: str | None = None
    student: str | None = None


class Serving(_Answer):
    """How far vLLM is with the adapters that the trainer has published last."""

    published_step: Count
    replicas: Count
    synced: Count
    sync_seconds: float = Field(default=0, ge=0)
    waiting: bool = False
    message: str = ""


class Progress(_Answer):
    """The answer of `/status`; times are seconds, rates are shares."""

    phase: str = ""
    step: Count
    steps: Count
    estimated_seconds_remaining: float | None = Field(default=None, ge=0)
    members: tuple[Member, ...] = Field(default=(), max_length=MAX_MEMBERS)
    best: Best = Field(default_factory=Best)
    solve_rate: Share | None = None
    coverage: Share | None = None
    serving: Serving | None = None

    @property
    def seconds_per_step(self) -> float | None:
        """The present pace, None where it is not known."""
        left = self.steps - self.step
        if self.estimated_seconds_remaining is None or left <= 0:
            return None
        return self.estimated_seconds_remaining / left


def first_pod(observed: Observed, job: Job) -> Pod | None:
    """Return the running pod with index 0 that the Job has made, whatever it is called."""
    for pod in observed.pods_of(job):
        if pod.index == 0 and pod.phase == "Running" and pod.ip and not pod.deleting:
            return pod
    return None


class Reader:
    """Asks trainers for their progress over one connection pool."""

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session

    async def read(self, pod: Pod) -> Progress | None:
        """Return the progress, None where the pod does not answer in time or answers with something else."""
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            url = f"http://{host}:{names.STATUS_PORT}/status"
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        return None
            return Progress.model_validate_json(bytes(body))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("%s: %s", pod.name, error)
        except ValidationError as error:
            logger.warning("%s: its /status is not understood: %s", pod.name, error.errors()[0]["msg"])
        return None


def last_words(observed: Observed, job: Job) -> Progress | None:
    """Return the `/status` that a trainer has left as termination message of its pod 0, None where it has not.

    It may have taken its last steps since it was last asked.
    """
    for pod in observed.pods_of(job):
        for container in pod.containers if pod.index == 0 and pod.phase == "Succeeded" else ():
            if container.exit_code == 0 and container.exit_message.startswith("{"):
                try:
                    return Progress.model_validate_json(container.exit_message)
                except ValidationError:
                    continue
    return None


def read_scores(pods: Sequence[Pod], step: int) -> tuple[EvaluationResult, ...]:
    """Return the scores in the termination message of an evaluation's pod.

    The message is JSON: a list of [suite, member, score, problems]. What is something else is left out.
    """
    for pod in pods:
        for container in pod.containers:
            if pod.phase != "Succeeded" or container.exit_code != 0 or not container.exit_message:
                continue
            try:
                rows = json.loads(container.exit_message)
                return tuple(
                    EvaluationResult(suite=suite, member=member, step=step, score=float(score), problems=problems)
                    for suite, member, score, problems in rows
                )
            except (ValueError, TypeError, RecursionError):
                continue
    return ()
