"""`populora status`: where a run stands, on one screen."""

import json

import click


@click.command("status")
@click.argument("place", metavar="DIR|URI")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(place: str, as_json: bool) -> None:
    """Show where a run stands: step, members, ratings, solve rates. It may be training meanwhile.

    A URI is s3://BUCKET/PREFIX; the environment says how to reach the bucket (AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID, ...).
    """
    from populora_trainer.storage.overview import overview

    found = overview(place)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    whose = f"; training in {found.holder}" if found.holder else "" if "://" in place else "; nobody is training it"
    steps = "no step is committed yet" if found.step is None else f"step {found.step} of {found.steps or '?'}"
    console.print(f"[bold]{escape(found.name)}[/bold] in {escape(place)}: {steps}{escape(whose)}", soft_wrap=True)
    if found.solve_rate:
        rates = ", ".join(f"{task} {_percent(rate)}" for task, rate in found.solve_rate.items())
        console.print(f"solve rate at step {found.metrics_step}: {rates}; valid proposals {_percent(found.valid_rate)}")
    if found.held_out is not None:
        console.print(f"held-out solve rate at step {found.held_out_step}: {_percent(found.held_out)}")
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("member", "left"), ("lcb", "right"), ("mu", "right"), ("sigma", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for heading in ("games", "bred by", "parents"):
        table.add_column(heading, justify="right" if heading == "games" else "left")
    for member in found.members:
        table.add_row(
            member.name,
            f"{member.lcb:.2f}",
            f"{member.mu:.2f}",
            f"{member.sigma:.2f}",
            str(member.games),
            member.operator or "-",
            " ".join(member.parents) or "-",
        )
    if found.members:
        console.print(table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
