"""One file for each queue that is measured, omniq included. `README.md` describes such a file."""
