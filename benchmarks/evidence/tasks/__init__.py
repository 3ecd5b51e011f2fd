"""Small tasks in single characters that a claim needs and no package has."""
