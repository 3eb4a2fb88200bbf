"""Adapters for the embedded base, and what vLLM says with them."""

import json
import urllib.request
from pathlib import Path

import torch

from populora_trainer.nano.registry import builtin_folder
from populora_trainer.population.factors import Pair
from populora_trainer.population.peft_format import AdapterConfig
from populora_trainer.storage.checkpoint import Adapter

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def shapes() -> dict[str, tuple[int, int]]:
    """Return (out, in) of each adapted module of the base by its path."""
    config = json.loads((builtin_folder("nano") / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    of_layer = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    of_layer["o_proj"] = (hidden, queries)
    return {
        f"model.layers.{layer}.self_attn.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in of_layer.items()
    }


def random_adapter(seed: int, scale: float = 0.3) -> Adapter:
    """Return an adapter with random factors that changes what the base says."""
    generator = torch.Generator().manual_seed(seed)
    factors = {
        path: Pair(
            scale * torch.randn(RANK, inputs, generator=generator),
            scale * torch.randn(outputs, RANK, generator=generator),
        )
        for path, (outputs, inputs) in shapes().items()
    }
    return Adapter(factors, AdapterConfig(RANK, 16.0, TARGETS, "builtin://nano"))


def greedy(url: str, name: str, prompt: list[int], tokens: int = 24) -> list[int]:
    """Return the token ids that vLLM finds most likely, one after the other."""
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    (choice,) = ask(f"{url}/v1/completions", body)["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


def served(url: str) -> dict[str, str]:
    """Return the path of each adapter that vLLM serves, by name."""
    return {card["id"]: Path(card["root"]).name for card in ask(f"{url}/v1/models")["data"] if card["parent"]}


def ask(url: str, body: object = None) -> dict:
    """Return the answer to a GET, or to a POST where there is a body; JSON where it is."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
    try:
        return json.loads(text)
    except ValueError:
        return {"text": text.decode()}
