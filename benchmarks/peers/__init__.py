"""One file for each queue that is measured, omniq included. `README.md` says what such a file has."""
