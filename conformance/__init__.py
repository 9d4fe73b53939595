"""The judge: clauses, cases, checks, mutants, verdicts. It knows an implementation only through the contract (`reference`)."""
