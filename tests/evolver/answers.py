"""What scripted language models answer, in the form of each role, and the role that is asked."""

from tests.evolver.explorers import proposal

ROLE_OF = {  # by the beginning of the last paragraph of a prompt
    "Grade all": "step_judge",
    "Give the score": "judge",
    "What can be learned": "summariser",
    "Score every piece": "validator",
    "Choose at most": "reranker",
    "Invent at most": "writer",
}


def role_of(body):
    last = body["messages"][-1]["content"].rpartition("\n\n")[2]
    return next((role for sign, role in ROLE_OF.items() if last.startswith(sign)), "explorer")


def graded(*steps, analysis=""):
    return {"steps": [{"step": n, "analysis": analysis, "label": word} for n, word in steps]}


def scored(score):
    return {"analysis": "", "score": score}


def learnt(*contents, when="When a book is to be lent"):
    return {"experiences": [{"when": when, "content": content} for content in contents]}


def verdicts(*pairs):
    return {"verdicts": [{"number": n, "reason": "", "score": score} for n, score in pairs]}


def chosen(*pairs):
    return {"chosen": [{"number": n, "content": content} for n, content in pairs]}


def written(*steps, query="Please lend me Solaris.", **options):
    """Return the answer of a writer with one idea."""
    return {"tasks": [proposal(query, *steps, **options)]}
