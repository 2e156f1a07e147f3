"""All statements on one subject: what each module of `wqk.theory` computes, as findings."""
