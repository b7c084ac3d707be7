"""The tests of every mini task. Copied into each task's folder, where AppWorld's evaluator runs `evaluate`.

`private_data` of a task says what a solution leaves behind:

    changes   {"app.Model": {"added" | "updated" | "removed": [fields of one record, ...]}}
    touched   models that may change with them: counters, balances, notifications

Each expected record is a test of its own, which doing nothing fails; that nothing else changed is a test which doing
nothing passes. Standard library only, and nothing of ours: it is run from where it was copied to.
"""

import json

ANSWER = "The answer is the expected one."
NOTHING_ELSE = "Nothing else has changed."
KINDS = ("added", "updated", "removed")


def requirements(private_data, answer):
    """The tests of a task, each with whether doing nothing passes: [{"requirement", "label"}]."""
    labels = {ANSWER: "no_op_pass" if answer is None else "no_op_fail"}
    for model, expected in private_data["changes"].items():
        for kind in KINDS:
            labels |= {_one(model, kind, i): "no_op_fail" for i in range(len(expected.get(kind, [])))}
        labels[_only(model)] = "no_op_pass"
    labels[NOTHING_ELSE] = "no_op_pass"
    return [{"requirement": requirement, "label": label} for requirement, label in labels.items()]


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    """Called by AppWorld's evaluator; each `with test(...)` is one test."""
    with test(ANSWER):
        test.answer(models.end.supervisor.Task.first().answer, ground_truth_answer)
    for model, expected in private_data["changes"].items():
        changed = dict(zip(KINDS, models.changed_records(model)))
        unexpected = 0
        for kind in KINDS:
            left = list(changed[kind])
            for i, fields in enumerate(expected.get(kind, [])):
                match = next((record for record in left if _matches(record, fields)), None)
                with test(_one(model, kind, i)):
                    test.case(match is not None, "==", True)
                left = [record for record in left if record is not match]
            unexpected += len(left)
        with test(_only(model)):
            test.case(unexpected, "==", 0)
    with test(NOTHING_ELSE):
        allowed = {*private_data["changes"], *private_data["touched"]}
        test.case(sorted(set(models.changed_model_names()) - allowed), "==", [])


def _matches(record, fields):
    return all(_plain(getattr(record, name)) == _plain(value) for name, value in fields.items())


def _plain(value):
    if isinstance(value, float):
        return round(value, 2)
    return json.loads(json.dumps(value, default=lambda moment: moment.isoformat()))


def _one(model, kind, i):
    return f"Expected record {i + 1} was {kind} in {model}."


def _only(model):
    return f"No other record has changed in {model}."
