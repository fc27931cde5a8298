"""The processes of one program: start-up barrier, watch over each other, preflight check."""
