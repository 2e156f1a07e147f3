"""The paper's statements as computations, each beside the assumption it rests on."""
