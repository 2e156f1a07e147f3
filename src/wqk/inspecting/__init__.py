"""One checkpoint looked at closely: its forms, its tokens, whether they are right."""
