"""The part of vLLM's HTTP interface by which adapters are loaded and unloaded while it runs.

vLLM must run with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. An adapter is never loaded over another of
the same name: vLLM's prefix cache would go on with the old one's keys and values.

Source: vLLM 0.32, `entrypoints/serve/lora/api_router.py` and `entrypoints/openai/models/serving.py`.
"""

import json
from dataclasses import dataclass

import aiohttp

from populora_trainer.serving.failures import ServingError


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long vLLM may take, in seconds.

    Attributes:
        answer: to say how it is and what it serves.
        load: to load or unload one adapter; it waits for the forward pass that is going on.
    """

    answer: float = 5.0
    load: float = 120.0


class Vllm:
    """A vLLM server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeouts: Timeouts | None = None) -> None:
        """Speak to the server at an address; no request is made yet.

        Args:
            url: of the server, e.g. `http://127.0.0.1:8000`.
            session: with connections that are not used twice, as vLLM drops those that are idle.
            timeouts: of its answers.
        """
        self.url = url.rstrip("/")
        self._session = session
        self._timeouts = timeouts or Timeouts()

    async def served(self) -> dict[str, str]:
        """Return the path of each adapter that a healthy server serves, by name.

        Raises:
            ServingError: it does not answer, or its engine is dead.
        """
        status, text = await self._ask("GET", "/health", None, self._timeouts.answer)
        if status != 200:
            raise ServingError("vllm", f"vLLM at {self.url} is not healthy: {_said(status, text)}", gone=True)
        status, text = await self._ask("GET", "/v1/models", None, self._timeouts.answer)
        try:
            if status != 200:
                raise ValueError
            cards = json.loads(text)["data"]
            # The base model's card has no parent.
            return {str(card["id"]): str(card["root"]) for card in cards if card.get("parent") is not None}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ServingError("vllm", f"{self.url}/v1/models is not vLLM's: {_said(status, text)}") from error

    async def load(self, name: str, path: str) -> None:
        """Load an adapter; one that is loaded under this name stays as it is.

        Raises:
            ServingError: vLLM refuses it, or does not answer.
        """
        body = {"lora_name": name, "lora_path": path}
        status, text = await self._ask("POST", "/v1/load_lora_adapter", body, self._timeouts.load)
        if status == 404 and "Not Found" in text and name not in text:
            raise ServingError(
                "refused",
                f"vLLM at {self.url} can't load adapters while it runs: start it with --enable-lora and the "
                f"environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
            )
        if status != 200 and not (status == 400 and "already been loaded" in text):
            raise ServingError("refused", f"vLLM at {self.url} does not load {name} from {path}: {_said(status, text)}")

    async def unload(self, name: str) -> None:
        """Unload an adapter; one that is not loaded is unloaded already.

        Raises:
            ServingError: vLLM refuses, or does not answer.
        """
        status, text = await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, self._timeouts.load)
        if status not in (200, 404):
            raise ServingError("refused", f"vLLM at {self.url} does not unload {name}: {_said(status, text)}")

    async def _ask(self, method: str, path: str, body: dict[str, str] | None, seconds: float) -> tuple[int, str]:
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                return answer.status, await answer.text(errors="replace")
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or error.os_error
            raise ServingError("vllm", f"vLLM at {self.url} can't be reached: {reason}", gone=True) from error
        except TimeoutError as error:
            raise ServingError("vllm", f"vLLM at {self.url} has not answered {path} within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise ServingError("vllm", f"vLLM at {self.url} broke off its answer to {path}: {error}") from error


def _said(status: int, text: str) -> str:
    """Return an answer's status and the message in it, in one line."""
    try:
        answer = json.loads(text)
        text = str(answer.get("error", answer).get("message", text))
    except (ValueError, AttributeError, RecursionError):
        pass
    return f"it answered {status} {' '.join(text.split())[:300]}".rstrip()
