"""Rules of torch's functions in frozen runs, and the functions of other packages that mix tokens."""
