"""The commands that use a trained model: `predict` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import DataDir, Device, Json, Trust

Run = Annotated[Path, typer.Argument(help="A run directory.")]
Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Use model-NAME.safetensors, e.g. best or ema (default: model.safetensors)."),
]
Client = Annotated[
    str | None, typer.Option(metavar="NAME", help="Use the own model of this client: its name, or its number.")
]
Regularizer = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="With --client, the model that `fedadc personalize` has tuned with this one."),
]


def predict(
    run: Run,
    data: Annotated[Path, typer.Option(help="New data, without labels: .csv, .npz or a folder of images.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write: .csv, .json or .parquet (default: print CSV).")
    ] = None,
    model: Model = None,
    client: Client = None,
    regularizer: Regularizer = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace an existing file.")] = False,
    data_dir: DataDir = None,
    device: Device = "cpu",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Predict new data with the model of a run: classes and their probabilities."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.cli.terminal import note, progress_of_rows, say
    from fedadc.trained.predict import predict as predict_data
    from fedadc.trained.predictions import as_csv, as_json

    with progress_of_rows() as watch:
        found = predict_data(
            run, data, out, model=model, client=client, regularizer=regularizer, overwrite=overwrite,
            data_dir=data_dir, device=device, trust=trust, watch=watch, notes=note,
        )  # fmt: skip
    if out is not None:
        say(f"written: {out} ({len(found):,} rows)")
    else:
        typer.echo((as_json if json else as_csv)(found.columns()).decode(), nl=False)


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    format: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="state_dict (the default), torch or onnx; may be repeated."),
    ] = None,
    model: Model = None,
    client: Client = None,
    regularizer: Regularizer = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace an earlier export.")] = False,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Write the model of a run for use without fedadc, with a description and a model card."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.cli.terminal import note, say
    from fedadc.trained.export import export as export_model

    files = export_model(
        run, out, format=format or ["state_dict"], model=model, client=client, regularizer=regularizer,
        overwrite=overwrite, data_dir=data_dir, trust=trust, notes=note,
    )  # fmt: skip
    for file in files:
        say(f"written: {file}")
