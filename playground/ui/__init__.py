"""What all commands share: options, tables, progress, JSON. Begin with `session`.

A command and its options:

    session       one run of a command: its world, what it says, the JSON document that it ends with
    run_options   the options of every run
    options       options, made of the flags of a dataclass
    option_types  what may follow an option
    commands      --help, and the answer to an option that a command lacks
    misplaced     an option that stands behind the name of a script
    gpus          --gpus, --gpu-memory
    paths         files that are to be written

What a command prints:

    text, tables, units  pieces of text, tables, amounts
    rendering            from these, and from chapters, to lines, by rich
    terminal             its width, how lines get there, and the bar
"""
