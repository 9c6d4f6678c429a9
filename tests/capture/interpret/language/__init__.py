"""Small Python programs by theme; tests/capture/interpret/test_language.py runs each eagerly and compiled, and compares everything that can be seen."""
