"""The side of a world inside its ranks: what they run, and what they are members of.

Begin with `rank`: it takes an assignment from the launcher, runs the function, and reports.

rank            runs the function, reports to the launcher, follows its orders
assignment      what the launcher asks of a rank
member          creates and destroys the process group
program_groups  a program's own calls of init_process_group and new_group

process         a rank begins and ends as a script does
process_state   what is put back before each function, and compared after it
generators      random numbers
default_device  the device on which a program creates its tensors

debugger        breakpoints and questions
preemption      a world that is asked to end soon
reports         progress
"""
