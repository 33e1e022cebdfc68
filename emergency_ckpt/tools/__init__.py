"""Programs that people run beside a training job. The library never imports them."""
