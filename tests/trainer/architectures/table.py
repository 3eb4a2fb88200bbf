"""The page docs/reference/architectures.md, from what the survey finds; run this file to write it."""

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from survey import Finding, save, survey
from zoo import ARCHITECTURES, Architecture

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "architectures.md"

HEAD = """\
# Architectures

Written by `make docs` from tests/trainer/architectures; do not edit. The tests compute every row again and fail where
this page says something else.

For each architecture of `transformers` a tiny model with random weights goes the whole way: it samples with a cache in
padded batches of all members, its adapters are exported, and the update differentiates. PEFT loads the exported
adapters and computes every sequence alone. **Exact** means that log-probabilities and gradients equal PEFT's but for
the rounding of float32. What is refused is refused before the first step, with the sentence below and the reason. With
`inference.engine: VLLM` vLLM samples, and must know the architecture.

- *Attention* is transformers' implementation. Where it is eager, the update needs memory for each row's length squared.
- *Shared prompts*: completions of a prompt share its computation in the update. Where layers have windows or a state,
  each completion computes its own.

An architecture that is not listed may work: the same checks run at every start, on the base itself.

| architecture | model type | `adapter.targetModules` | result | attention | shared prompts |
|---|---|---|---|---|---|
"""


def row(name: str, architecture: Architecture, targets: tuple[str, ...], finding: Finding) -> str:
    """Return a line of the table."""
    cells = [name, f"`{architecture.model_type}`", ", ".join(targets)]
    if finding.refusal is not None:
        # Numbers and the words of other libraries vary from run to run.
        sentence = re.sub(r" \(.*\)(?=[;,])|, off by [^;]*", "", finding.refusal)
        cells += [f"refused: {sentence}", "", ""]
    else:
        cells += ["exact" if finding.exact else f"off by {finding.logprobs:.0e} nats", finding.attention]
        cells += ["yes" if finding.shares else "no"]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def main() -> None:
    """Write the page."""
    lines = []
    for name, architecture in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as scratch:
            save(architecture, Path(scratch) / "model")
            for number, targets in enumerate(architecture.targets):
                finding = survey(Path(scratch) / "model", targets, Path(scratch) / str(number))
                lines.append(row(name, architecture, targets, finding))
        print(f"{name} done", flush=True)
    PAGE.write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main()
