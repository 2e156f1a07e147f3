"""One checkpoint in detail: explanation, pictures of forms, token pairs, composition of heads."""
