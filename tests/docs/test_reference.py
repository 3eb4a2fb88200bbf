"""The reference pages and the chart's generated files are what the code says, and links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_files_are_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as Markdown viewers make them from headings, and those set by hand."""
    text = page.read_text()
    headings = (line.lstrip("#").strip().lower() for line in text.splitlines() if re.match(r"#+ ", line))
    made = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
