"""`hirank run -- COMMAND`: any trainer that stands on PEFT, with hirank's layers, nothing changed.

The command is started with a private folder in front of its PYTHONPATH. Every Python process below
it finds a `sitecustomize.py` there, which waits for the import of PEFT; what never imports PEFT
never notices. `docs/run.md` is the guide.

    process.py      the parent: start the command, hand on signals, sum up
    interpreter.py  which Python a command runs under, and whether hirank works there
    startup.py      what each Python process executes first
    child.py        what it does once PEFT is imported: convert, and say so
    trainers.py     what single trainers do to PEFT's layers
    records.py      what was converted, on its way from the processes to the parent; in words
"""
