"""The tests of every mini task. The file is copied into each task's folder, where AppWorld's
evaluator runs `evaluate`.

`private_data` of a task lists the effects of a solution:

    changes   {"app.Model": {"added" | "updated" | "removed": [fields of one record, ...]}}
    touched   models that may change as a side effect: counters, balances, notifications

Each expected record is one test, which doing nothing fails. Tests that nothing else has changed
pass without doing anything. The file imports the standard library only, because it runs as a copy.
"""

import json
from typing import Any

ANSWER = "The answer is the expected one."
NOTHING_ELSE = "Nothing else has changed."
KINDS = ("added", "updated", "removed")


def requirements(private_data: dict[str, Any], answer: Any) -> list[dict[str, str]]:
    """Return the tests of a task as [{"requirement", "label"}]; the label says if doing nothing
    passes."""
    labels = {ANSWER: "no_op_pass" if answer is None else "no_op_fail"}
    for model, expected in private_data["changes"].items():
        for kind in KINDS:
            labels |= {
                _expected_record(model, kind, i): "no_op_fail"
                for i in range(len(expected.get(kind, [])))
            }
        labels[_no_other_record(model)] = "no_op_pass"
    labels[NOTHING_ELSE] = "no_op_pass"
    return [{"requirement": requirement, "label": label} for requirement, label in labels.items()]


def evaluate(
    test: Any,
    public_data: Any,
    private_data: dict[str, Any],
    main_user: Any,
    models: Any,
    ground_truth_answer: Any,
) -> None:
    """Run the tests for AppWorld's evaluator; each `with test(...)` is one test."""
    with test(ANSWER):
        test.answer(models.end.supervisor.Task.first().answer, ground_truth_answer)
    for model, expected in private_data["changes"].items():
        changed = dict(zip(KINDS, models.changed_records(model)))
        unexpected = 0
        for kind in KINDS:
            unmatched = list(changed[kind])
            for i, fields in enumerate(expected.get(kind, [])):
                match = next((record for record in unmatched if _matches(record, fields)), None)
                with test(_expected_record(model, kind, i)):
                    test.case(match is not None, "==", True)
                unmatched = [record for record in unmatched if record is not match]
            unexpected += len(unmatched)
        with test(_no_other_record(model)):
            test.case(unexpected, "==", 0)
    with test(NOTHING_ELSE):
        allowed = {*private_data["changes"], *private_data["touched"]}
        test.case(sorted(set(models.changed_model_names()) - allowed), "==", [])


def _matches(record: Any, fields: dict[str, Any]) -> bool:
    return all(_plain(getattr(record, name)) == _plain(value) for name, value in fields.items())


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 2)
    return json.loads(json.dumps(value, default=lambda moment: moment.isoformat()))


def _expected_record(model: str, kind: str, i: int) -> str:
    return f"Expected record {i + 1} was {kind} in {model}."


def _no_other_record(model: str) -> str:
    return f"No other record has changed in {model}."
