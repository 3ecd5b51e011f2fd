"""What listens: who is answered (`guard`), and a socket that slow clients cannot stall (`listening`)."""
