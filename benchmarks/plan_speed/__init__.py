"""How many candidates a second `memir plan` evaluates from one traced program."""
