"""A scheduler of your own: running requests go on, the shortest waiting ones start first.

PYTHONPATH=examples inflight serve --set scheduler_class=own_scheduler:ShortestFirst
"""

from inflight_scheduler import MicroBatchScheduler, RequestScheduler


class ShortestFirst(RequestScheduler):
    """Each decision is checked by the server before it is carried out."""

    def __init__(self, block_manager, max_batch_size, max_num_tokens):
        self.blocks = block_manager
        self.micro_batch = MicroBatchScheduler(max_batch_size, max_num_tokens)

    def schedule_request(self, active_requests, inflight_request_ids):
        """Return the requests whose context runs, those that generate, and those to pause."""
        running = [r for r in active_requests if r.is_generation_in_progress_state]
        free = self.blocks.num_free_blocks
        free -= sum(map(self.blocks.get_remaining_blocks_to_completion, running))
        fitting = list(running)
        waiting = (r for r in active_requests if r.is_context_init_state)
        for request in sorted(waiting, key=lambda r: r.num_remaining_tokens):
            free -= self.blocks.get_remaining_blocks_to_completion(request)
            if free < 0:
                break
            fitting.append(request)
        context, generation = self.micro_batch.schedule(fitting, inflight_request_ids)
        return context, generation, []
