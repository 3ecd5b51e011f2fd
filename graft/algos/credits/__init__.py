"""Credits: from rewards to advantages. `credit.py` says what one is, `table.py` lists them."""
