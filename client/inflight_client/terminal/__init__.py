"""What a person does in a terminal: chat, look on, measure."""
