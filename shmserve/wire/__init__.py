"""What the bytes in a slot mean: the one package that knows.

Owns: the record layouts of both rings, packing, unpacking, and merging of token records. Never: touches a ring. Little
endian, explicit offsets, checked by golden bytes in the tests. All times are CLOCK_MONOTONIC ns. One module for
each kind of record; submit_slots < submit, and tokens < logprobs, finish.

Token slot, 128 bytes (worker -> front end)

     0  req_id u8    8  time_ns u8 (first token's)   16  index u4 (of the first token in its completion)
    20  kind u1     21  count u1 (tokens or pairs)   22  finish u1      23  flags u1      24  step u8
    32  TOKENS:         token_ids i4[8], dt_us u4[8], logprobs f4[8]; dt_us[0] is the publish delay, dt_us[1:] are the later
                        tokens' times after the first
        PROMPT_LOGPROBS: as TOP_LOGPROBS, before the first TOKENS. With FLAG_RUN: one pair for each of the prompt's tokens from
                        `index` on. Without: token `index` of the prompt, then the most likely in its place, over as many
                        slots of this index as it takes
        TOP_LOGPROBS:   token_ids i4[12], logprobs f4[12]: the most likely tokens of position `index`; stands before the TOKENS
                        slot that closes its group
        STARTED/FINISH: prompt_tokens u4, cached_tokens u4, num_retractions u4, keep_bytes u4, matched_token i4,
                        matched_stop i4, received_ns u8, admitted_ns u8, scheduled_ns u8, prefill_end_ns u8, first_token_ns u8,
                        num_verified u4, num_drafts u4, num_accepted u4 (steps that verified guesses; those; of them right);
                        index = tokens generated so far
        MESSAGE:        count bytes of UTF-8 text (at most 96); stand before the FINISH that they explain

Submit slot, 4,096 bytes (front end -> worker)

     0  req_id u8    8  kind u1    9  flags u1   10  num_slots u2   12  length u4 (bytes of sections, over all slots)   16  time_ns u8
    24  SUBMIT: SUBMIT_DTYPE's fields; sections begin at 256: tag u2, zero u2, length u4, then the bytes, padded to 4
        CONTINUATION: bytes 8.. kind; 10 its number u2; sections go on at 16
        ABORT, PAUSE, RESUME: the request of req_id.  ABORT_BY_ID: 16-byte digest at 24 (zeros: all);
        answered by a FINISH under req_id, whose matched_token counts them.  FLUSH_CACHE: answered under req_id
        EVICT: the request of req_id, whosever it is, unless it was begun; ABORT_BY_ID with 8 zero bytes and a req_id: that one

req_id = generation << 24 | front end index << 16 | table slot: a stale record can never reach a new request.
Every SUBMIT is answered by exactly one FINISH, or by the channel's end.
"""
