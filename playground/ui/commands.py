"""Commands: their --help, and what they say to an option that they do not have."""

from __future__ import annotations

import click

HEADINGS = {
    "Ranks": ("size", "backend", "gpus", "gpu_memory", "timeout", "seed", "restarts"),
    "Options": (),
    "Training": ("batch_size",),
    "Data": ("dataset", "limit"),
    "Output": ("wide", "as_json", "output", "output_dir", "see", "plot", "--help"),
}
"""Options that several commands have, under their headings in --help. "Options" are all others."""
SIZES = (
    "--rank",
    "--ranks",
    "--size",
    "--processes",
    "--nproc",
    "--nproc-per-node",
    "--np",
    "--nprocs",
)
MEANT = {"--record": "--see", **dict.fromkeys(SIZES, "-n")}
"""Names under which options are looked for; those of other programs for the number of ranks."""


class Command(click.Command):
    """A command whose --help has its options under `HEADINGS`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = MEANT.get(error.option_name)
            for param in self.get_params(ctx):
                if meant in param.opts:
                    names = ", ".join(map(repr, param.opts))
                    # as a message: click leaves out names that are not spelled alike
                    message = f"{error.message} Did you mean {names}?"
                    raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {
            "--help" if "--help" in param.opts else param.name: param
            for param in self.get_params(ctx)
        }
        records = {
            name: record for name, param in params.items() if (record := param.get_help_record(ctx))
        }
        shared = {name for names in HEADINGS.values() for name in names}
        own = {"Options": [name for name in records if name not in shared]}
        for heading, names in {**HEADINGS, **own}.items():
            if rows := [records[name] for name in records if name in names]:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class Group(Command, click.Group):
    """The same, and then its subcommands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
