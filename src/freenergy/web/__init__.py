"""Models and people over HTTP: an OpenAI-style server, a playground, and a blind study.

Needs ``pip install 'freenergy[web]'``; nothing else in the package imports it.
"""
