"""Which command lies in which file, and in which order `eyas --help` lists them."""

import typer

from eyas.cli import (
    convert,  # noqa: F401, I001  adds `import` and `export` to store.app
    deploy,
    doctor,
    export,
    init,
    plan,
    prepare,
    regenerate,
    report,
    run,
    serve,
    stage_commands,
    status,
    store,
    tune,
)


def register(app: typer.Typer) -> None:
    app.command()(init.init)
    app.command()(plan.plan)
    app.command()(run.run)
    app.command()(regenerate.regenerate)
    app.command()(prepare.prepare)
    for name, command in stage_commands.COMMANDS.items():
        app.command(name)(command)
    app.command()(export.export)
    app.command()(status.status)
    app.command()(report.report)
    app.command()(tune.tune)
    app.command()(deploy.deploy)
    app.command()(doctor.doctor)
    app.add_typer(serve.app, name="serve")
    app.add_typer(store.app, name="store")
