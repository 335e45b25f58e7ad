"""LoRA plugins. They share how PEFT folders are read (`peft_folder`) and how slots are kept (`slots`)."""
