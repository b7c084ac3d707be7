"""Language models other than the policy: client, answers, cache, ledger and budget, roles, prompts,
embedders."""
