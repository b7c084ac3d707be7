"""Controls, which decide how the tables are to be read, and runs beyond the paper. 14B, AppWorld
test-normal, avg@8.

    python -m experiments.paper controls
    python run.py --config=configs/paper/controls.py:clip_low20 --mode=plan

Where the paper and its reference code differ: the lower clip bound (0.28 in the paper, 0.2 in the
code), alpha of the full system (0.1, 0.2), the standardisation of labels (three variants), the
experiences in a prompt (5, 3), the prompt of the ratio's denominator (stripped, guided), the model
that writes tasks. Beyond the paper: hybrid tasks with all mechanisms, which it never ran, LOOP's
estimator without KL, tasks near the limit of the policy and explored anew, CISPO, alpha on a
cosine, labels over the root of the length. None has a published score; `q`, `qn`, `qa`, `all`,
`original` and `hybrid` are those of tables 1 and 2.

Two controls are no cells. A BAD label of 0 instead of -1 changes nothing: labels are standardised,
which undoes any affine change. Experience from held-out tasks, which the reference uses, is refused
as a leak. Every evaluation of the others is at temperatures 0.9 and 0. Confirmed: none. Expected:
13 runs, about 2,010 GPU-hours of A100 (arithmetic, not measured).
"""

from configs.paper import cells

ORDERS = ["hybrid_all > all", "hybrid_all > hybrid"]
get_config = cells.config_of("controls")
