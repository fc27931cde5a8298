"""The processes of one program: their start, their watch over each other, the check before."""
