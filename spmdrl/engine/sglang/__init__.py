"""The SGLang engine; nothing outside this folder imports SGLang to sample.

engine                          requests in, responses out; the buckets of a refit
process                         SGLang's processes, and calls of them
options, models, fewer_bits     SGLang's arguments, and which settings and models do not fit
layout, loader                  where weights belong in SGLang; loader.py and scheduler.py run in its processes
transport                       the way of a bucket to these
requests, tool_calls            images and routes; calls in responses
adapters                        one name in SGLang for each version
libraries, surroundings         what its processes need to start
"""
