"""Is the advice right? Predicted and real accuracy and time of plans that are drawn by a rule, and then fine-tuned.

`python benchmarks/advice.py RUN --results DIR --data NAME --out DIR [--plans 16] [--seeds 2] [--limit 10000]`
`python benchmarks/advice.py --page FILE EVIDENCE.json ...` draws the page of one or several results.
RUN is a finished run of `regard train host`, the user's model. Needs the data of the run.

The rule, which was written down before anything was fine-tuned: all candidates learn layer by layer as in
`regard advise`; 200 assignments are drawn with `DRAW_SEED`, each layer uniformly over its own attention and the
candidates; they are sorted by their predicted loss (the divergence of the class scores of the whole assignment, on
images that nothing learned from) and cut into quartiles; from each quartile a quarter of the plans is taken, evenly
spaced in it. The plan that `advise` recommends for latency=0.8x is fine-tuned beside them. Each starts from its learned
layers and is fine-tuned for one epoch on the first `--limit` training images, with the same recipe and seeds; accuracy
is that on all test images. Intermediate results are kept in --out, so that the same command goes on after a stop.

Models, each named before any of its plans was fine-tuned: vit_desk(patch=2) on 24 x 24 windows of CIFAR-10;
xcit_desk(patch=2, depth=6) on Fashion-MNIST, left out until the method was fixed; and, since attention hardly matters
there, xcit_desk(patch=2) on the windows of the ViT (12 epochs of `regard train host`), with the method as it was.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.core.allocator import ALLOCATOR
from regard.lab.train.execute import execute

DRAW_SEED, DRAWN, BOOTSTRAP = 20261124, 200, 10_000
STEPS, IMAGES, BATCH = 150, 480, 8
EPOCHS, RATE = 1, 5e-4
FILE = "evidence.json"
PREDICTORS = {
    "divergence": "divergence of the class scores after learning layer by layer",
    "additive": "sum of the divergences of each change alone, after learning",
    "swapped": "divergence of the class scores right after the swap",
    "layer_error": "mean relative error of the layers' outputs, after learning",
    "agreement": "share of images with another best class, after learning",
    "macs": "multiply-accumulates (more is better), no look at the model at all",
}


def candidates(tokens: int) -> tuple[Any, ...]:
    """The mechanisms of `regard advise`, with numbers that suit few tokens."""
    from regard import SKA, Agent, Linear, MiTA, Window
    from regard.swapping.removed import Removed

    m = round(math.sqrt(tokens) / 3) ** 2
    return (MiTA(m=m, k=m), Agent(m=m), Linear(), SKA(), Window(size=5), Removed())


def draw(names: list[str], choices: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """`DRAWN` different assignments, each layer uniformly over its choices (None: its own attention)."""
    import numpy as np

    rng, plans = np.random.default_rng(DRAW_SEED), []
    while len(plans) < min(DRAWN, math.prod(len(choices[name]) + 1 for name in names) - 1):
        plan = {name: ([None, *choices[name]])[rng.integers(len(choices[name]) + 1)] for name in names}
        if plan not in plans and any(mixer is not None for mixer in plan.values()):
            plans.append(plan)
    return plans


def by_quartile(plans: list[Any], losses: list[float], number: int) -> list[int]:
    """The rows of `number` plans, a quarter from each quartile of the losses, evenly spaced in it."""
    order = sorted(range(len(plans)), key=lambda row: losses[row])
    rows = []
    for quartile in range(4):
        part = order[quartile * len(order) // 4 : (quartile + 1) * len(order) // 4]
        each = number // 4
        rows += [part[(2 * i + 1) * len(part) // (2 * each)] for i in range(each)]
    return rows


def predict(run: Any, store: Any, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The drawn plans with what is predicted of them; starts for fine-tuning are saved below `out`."""
    import torch

    from regard.advice.fidelity import Fidelity, means
    from regard.advice.layer_costs import layer_costs, measure_usage
    from regard.advice.learning import Distillation, LayerDistillation
    from regard.advice.search import added_cost, additive_loss, as_plan, front
    from regard.advice.substitutes import Substitutes
    from regard.advice.user_model import read_user_images, split_images, tensors
    from regard.lab.train.load import load_user_run
    from regard.models.saving import save
    from regard.swapping.layer_plan import spell_layer_plan

    torch.manual_seed(0)
    model = load_user_run(store.folder(run.key))
    images, _ = read_user_images(arguments.data, model.size, model.channels, IMAGES)
    learned, judged = split_images(images)
    inputs = model.prepare(tensors(judged))
    patch = model.network.patch_embed.patch_size[0]
    mixers = candidates(model.size[0] * model.size[1] // patch**2)
    with Substitutes(model.network, mixers, model.example) as substitutes:
        fidelity = Fidelity(substitutes, inputs)
        names, choices = substitutes.names, {name: substitutes.choices(name) for name in substitutes.names}
        plans = draw(names, choices)
        swapped = [float(fidelity.scores(as_plan(plan)).kl.mean()) for plan in plans]
        print(f"{len(plans)} plans drawn; learning", flush=True)
        LayerDistillation(substitutes, model, learned, Distillation(steps=STEPS)).run()
        errors = fidelity.outputs()
        losses = means(fidelity.alone())
        changes = [fidelity.scores(as_plan(plan)) for plan in plans]
        print("predicted; measuring costs", flush=True)
        costs = layer_costs(substitutes, inputs[:BATCH], seconds=0.5)
        rows = by_quartile(plans, [float(change.kl.mean()) for change in changes], arguments.plans)
        own = measure_usage(substitutes, {"own": {}}, inputs[:BATCH], 2.0)["own"]
        within = [c for c in front(losses, costs, "latency") if added_cost(c, costs, "latency") <= -0.2 * own.seconds]
        verified = [(float(fidelity.scores(as_plan(choice)).kl.mean()), choice) for choice in within[:4]]
        recommended = min(verified, key=lambda pair: pair[0])[1] if verified else {}
        chosen = [*(plans[row] for row in rows), recommended]
        usage = measure_usage(
            substitutes, {"own": {}} | {str(i): as_plan(plan) for i, plan in enumerate(chosen)}, inputs[:BATCH], 1.0
        )
        records = []
        for index, plan in enumerate(chosen):
            change = fidelity.scores(as_plan(plan))
            row = rows[index] if index < len(rows) else None
            folder = save(substitutes.apply(as_plan(plan)), out / f"start-{index}")
            records.append({
                "plan": spell_layer_plan(as_plan(plan)), "start": folder.name, "recommended": row is None,
                "divergence": float(change.kl.mean()), "additive": additive_loss(plan, losses),
                "swapped": None if row is None else swapped[row],
                "layer_error": sum(float(errors[n, m].error.mean()) for n, m in as_plan(plan).items()) / len(names),
                "agreement": 1 - float(change.agrees.mean()), "macs": -usage[str(index)].macs / usage["own"].macs,
                "latency_predicted": 1 + added_cost(plan, costs, "latency") / own.seconds,
                "latency_measured": usage[str(index)].seconds / usage["own"].seconds,
            })  # fmt: skip
    return {"mixers": [repr(mixer) for mixer in mixers], "records": records}


def finetune(run: Any, record: dict[str, Any], seed: int, arguments: argparse.Namespace, out: Path) -> float:
    """The accuracy of a plan after fine-tuning from its learned layers, percent."""
    from regard.lab import Recipe, Run
    from regard.lab.results.results import Results
    from regard.lab.train.initial_weights import Saved

    task = replace(run.task, init="host", limit=arguments.limit)
    recipe = Recipe(epochs=EPOCHS, lr=RATE, augment=run.recipe.augment)
    tuned = Run(task=task, plan=record["plan"], recipe=recipe, seed=seed, start=Saved(str(out / record["start"])))
    outcome = execute(tuned, Results(out / "runs"), device="cpu")
    return float(outcome["metrics"]["top1"])


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank correlations with bootstrap intervals over plans, and how far the recommended plan is from the best."""
    import numpy as np

    from regard.measure.intervals import rank_correlation

    drawn = [record for record in records if not record["recommended"] and record["top1"]]
    accuracy = [-float(np.mean(record["top1"])) for record in drawn]

    def correlation(a: list[float], b: list[float]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        samples = [rng.integers(len(a), size=len(a)) for _ in range(BOOTSTRAP)]
        values = [rank_correlation([a[i] for i in rows], [b[i] for i in rows]) for rows in samples]
        low, high = np.quantile([value for value in values if value is not None], [0.025, 0.975])
        return {"value": rank_correlation(a, b), "low": float(low), "high": float(high), "n": len(a)}

    better = sorted(range(len(drawn)), key=lambda i: drawn[i]["divergence"])[: len(drawn) // 2]
    result: dict[str, Any] = {name: correlation([record[name] for record in drawn], accuracy) for name in PREDICTORS}
    half = [drawn[i]["divergence"] for i in better], [accuracy[i] for i in better]
    result["divergence, better half"] = correlation(*half)
    result["latency"] = correlation(
        [record["latency_predicted"] for record in drawn], [record["latency_measured"] for record in drawn]
    )
    recommended = next(record for record in records if record["recommended"])
    within = [record for record in drawn if record["latency_measured"] <= 0.8]
    result["recommended"] = {
        "top1": float(np.mean(recommended["top1"])),
        "latency": recommended["latency_measured"],
        "best of those within the budget": max((float(np.mean(record["top1"])) for record in within), default=None),
        "best of all": -min(accuracy),
    }
    return result


def render_page(files: list[Path]) -> str:
    """The page of results as HTML: correlations, accuracy and time of each plan beside what was predicted."""
    from dataclasses import asdict

    from regard import __version__
    from regard.pages.analysis_page import render_analysis
    from regard.pages.sheets import Chart, Sheet

    rule = str(__doc__)[str(__doc__).index("The rule, ") :]
    contents = [json.loads(file.read_text()) for file in files]
    sheets = []
    for content in contents:
        about, summary = content["about"], content["summary"]
        name = f"{about['host'].partition('(')[0]} on {about['data']}"
        names = {**PREDICTORS, "divergence, better half": "the first one, among the better half of its plans",
                 "latency": "time: predicted from the layers and measured of the model"}  # fmt: skip
        rows = tuple(
            (names[key], round(value["value"], 2), round(value["low"], 2), round(value["high"], 2), value["n"])
            for key, value in summary.items() if key in names
        )  # fmt: skip
        recommended = summary["recommended"]
        best = recommended["best of those within the budget"]
        note = (
            "Spearman's rank correlation with the accuracy after fine-tuning, 95 % bootstrap intervals over plans. "
            f"Before any swap: {about['top1']:.1f} %. Recommended for latency=0.8x: {recommended['top1']:.1f} % at "
            f"{recommended['latency']:.2f}x; best of the drawn plans: {recommended['best of all']:.1f} %, of those "
            f"within the budget: {'none was drawn' if best is None else f'{best:.1f} %'}. On {about['processor']}."
        )
        columns = ("predictor", "correlation", "low", "high", "plans")
        sheets.append(Sheet(title=f"{name}: what predicts", columns=columns, rows=rows, note=note))
        points = tuple(
            (
                round(record["divergence"], 4), round(sum(record["top1"]) / len(record["top1"]), 2),
                round(record["latency_predicted"], 3), round(record["latency_measured"], 3),
                "recommended" if record["recommended"] else "drawn", record["plan"],
            )
            for record in content["records"]
        )  # fmt: skip
        columns = ("divergence", "accuracy %", "predicted time", "measured time", "plan is", "plan")
        chart = Chart(x="divergence", y="accuracy %", series="plan is", kind="points")
        sheets.append(Sheet(title=f"{name}: each plan", columns=columns, rows=points, chart=chart))
        chart = Chart(x="predicted time", y="measured time", series="plan is", kind="points")
        title = f"{name}: time, to that of the model's own attention"
        sheets.append(Sheet(title=title, columns=columns, rows=points, chart=chart, folded=True))
    value = {
        "analysis": "benchmarks/advice.py", "title": "Is the advice right?", "source": "", "of": "", "scale": "",
        "question": "Plans were drawn by a rule, predicted without labels, and fine-tuned with labels.",
        "notes": [rule.replace("\n", " ").replace("`", "")],
        "sheets": [asdict(sheet) for sheet in sheets], "pictures": [],
        "environment": {},
        "code": __version__, "finished": "",
    }  # fmt: skip
    return render_analysis(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="*")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--data", default="")
    parser.add_argument("--out", type=Path, default=Path("advice-evidence"))
    parser.add_argument("--plans", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--limit", type=int, default=10_000)
    arguments = parser.parse_args()
    if arguments.page:
        arguments.page.write_text(render_page([Path(file) for file in arguments.run]), encoding="utf-8")
        return
    if len(arguments.run) != 1 or not arguments.data:
        parser.error("give one run and --data")
    settings = ALLOCATOR | {"OMP_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)
    from regard.lab.results.results import Results
    from regard.lab.train.run import read_run
    from regard.mixers.shared.native import processor_name

    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / FILE
    store = Results(arguments.results)
    run = read_run(store, arguments.run[0])
    before = (store.outcome(run.key) or {})["metrics"]["top1"]
    content = json.loads(file.read_text()) if file.exists() else predict(run, store, arguments, arguments.out)
    file.write_text(json.dumps(content, indent=1) + "\n")
    for record in content["records"]:
        scores = record.setdefault("top1", [])
        while len(scores) < arguments.seeds:
            scores.append(finetune(run, record, len(scores), arguments, arguments.out))
            file.write_text(json.dumps(content, indent=1) + "\n")
            print(f"{scores[-1]:.2f}  divergence {record['divergence']:.4f}  {record['plan']}", flush=True)
    about = {
        "host": run.task.host, "data": run.task.data, "top1": before, "limit": arguments.limit,
        "seeds": arguments.seeds, "epochs": EPOCHS, "lr": RATE, "steps": STEPS, "images": IMAGES,
        "processor": processor_name("model name"),
    }  # fmt: skip
    content = {"about": about, **content, "summary": summarise(content["records"])}
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["summary"], indent=1))


if __name__ == "__main__":
    main()
