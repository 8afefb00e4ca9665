# The driver under each tool, and under each tool once more with a planted fault that it must report.
#
#   tool       ranks are   build
#   plain      processes   as shipped; the only one that measures memory and processor time
#   address    processes   address, leak and undefined behaviour sanitizer
#   valgrind   processes   memcheck
#   thread     threads     thread sanitizer: it does not see races between processes

# Warnings are errors here, where developers and CI build, and not for users with another compiler.

TEST_SOURCES := tests/driver.c tests/support.c $(wildcard tests/walk_*.c)
TEST_HEADERS := $(wildcard tests/*.h)
TOOLS := plain address valgrind thread

TOOL_FLAGS_plain := -O3
TOOL_FLAGS_address := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
TOOL_FLAGS_valgrind := -O1 -fno-omit-frame-pointer
TOOL_FLAGS_thread := -O1 -fno-omit-frame-pointer -fsanitize=thread

TOOL_RUN_plain :=
TOOL_RUN_address := ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
TOOL_RUN_valgrind := valgrind --quiet --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite \
                     --show-leak-kinds=definite --fair-sched=try
TOOL_RUN_thread := TSAN_OPTIONS=halt_on_error=0:second_deadlock_stack=1

TOOL_ARGUMENTS_plain := processes
TOOL_ARGUMENTS_address := processes
TOOL_ARGUMENTS_valgrind := processes
TOOL_ARGUMENTS_thread := threads

TOOL_EXTRA_plain := plain
TOOL_EXTRA_valgrind := slow

# valgrind 3.19 does not know pidfd_open, says so in five lines, and hostcx does without.
SHORTEN := sed '/unhandled amd64-linux syscall: 434/,+4d'

# fault: the tool, and words of its report
FAULTS := overread undefined race valgrind_overread
FAULT_TOOL_overread := address
FAULT_TOOL_undefined := address
FAULT_TOOL_race := thread
FAULT_TOOL_valgrind_overread := valgrind
FAULT_FLAG_overread := -DPLANT_OVERREAD
FAULT_FLAG_undefined := -DPLANT_UNDEFINED
FAULT_FLAG_race := -DPLANT_RACE
FAULT_FLAG_valgrind_overread := -DPLANT_OVERREAD
FAULT_REPORT_overread := heap-buffer-overflow
FAULT_REPORT_undefined := runtime error: shift exponent
FAULT_REPORT_race := WARNING: ThreadSanitizer: data race
FAULT_REPORT_valgrind_overread := Invalid read of size

# Only these sources hold planted faults; the other objects are the tool's own.
PLANTED_SOURCES := collectives.c steps.c

define tool_rules
$(OUT)/$(1)/%.o: %.c $$(HEADERS) $$(TEST_HEADERS) Makefile sanitize.mk
	@mkdir -p $$(@D)
	@$$(CC) $$(COMMON) -Werror $$(NUMBERS) $$(TOOL_FLAGS_$(1)) -c -o $$@ $$<

$(OUT)/$(1)/reduce_kernels_%.o: reduce_kernels.c $$(HEADERS) Makefile sanitize.mk
	@mkdir -p $$(@D)
	@$$(CC) $$(COMMON) -Werror $$(NUMBERS) $$(TOOL_FLAGS_$(1)) $$(KERNEL_FLAGS_$$*) -DREDUCTIONS=reductions_$$* -c -o $$@ $$<

OBJECTS_$(1) := $$(SOURCES:%.c=$(OUT)/$(1)/%.o) $$(TEST_SOURCES:%.c=$(OUT)/$(1)/%.o) \
                $$(KERNELS:%=$(OUT)/$(1)/reduce_kernels_%.o)

$(OUT)/$(1)/driver: $$(OBJECTS_$(1))
	@$$(CC) $$(TOOL_FLAGS_$(1)) -pthread -o $$@ $$^ -lm
endef

define fault_rules
$(OUT)/planted_$(1)/%.o: %.c $$(HEADERS) Makefile sanitize.mk
	@mkdir -p $$(@D)
	@$$(CC) $$(COMMON) -Werror $$(NUMBERS) $$(TOOL_FLAGS_$$(FAULT_TOOL_$(1))) $$(FAULT_FLAG_$(1)) -c -o $$@ $$<

$(OUT)/planted_$(1)/driver: $$(PLANTED_SOURCES:%.c=$(OUT)/planted_$(1)/%.o) \
  $$(filter-out $$(PLANTED_SOURCES:%.c=$(OUT)/$$(FAULT_TOOL_$(1))/%.o),$$(OBJECTS_$$(FAULT_TOOL_$(1))))
	@$$(CC) $$(TOOL_FLAGS_$$(FAULT_TOOL_$(1))) -pthread -o $$@ $$^ -lm

.PHONY: planted_$(1)
planted_$(1): $(OUT)/planted_$(1)/driver
	@FAULT='$(1)' REPORT='$$(FAULT_REPORT_$(1))' LOG=$(OUT)/planted_$(1)/log sh tests/must_report.sh \
	    env HOSTCX_QUIET=1 $$(TOOL_RUN_$$(FAULT_TOOL_$(1))) $$< $$(TOOL_ARGUMENTS_$$(FAULT_TOOL_$(1))) 2 planted
endef

$(foreach tool,$(TOOLS),$(eval $(call tool_rules,$(tool))))
$(foreach fault,$(FAULTS),$(eval $(call fault_rules,$(fault))))

define run_tool
.PHONY: run_$(1)
run_$(1): $(OUT)/$(1)/driver $(if $(filter valgrind,$(1)),have_valgrind)
	@for ranks in 2 3; do \
	    echo "== hostcx under $(1), $$$$ranks ranks as $$(TOOL_ARGUMENTS_$(1))"; \
	    env HOSTCX_QUIET=1 $$(TOOL_RUN_$(1)) $$< $$(TOOL_ARGUMENTS_$(1)) $$$$ranks \
	        $$(TOOL_EXTRA_$(1)) 2>$(OUT)/$(1)/log_$$$$ranks \
	        || { $$(SHORTEN) $(OUT)/$(1)/log_$$$$ranks; echo "hostcx failed under $(1) at $$$$ranks ranks"; exit 1; }; \
	done
endef
$(foreach tool,$(TOOLS),$(eval $(call run_tool,$(tool))))

.PHONY: have_valgrind
have_valgrind:
	@sh tests/have_valgrind.sh

# One after the other: they measure, and they share few processors.
sanitize: $(TOOLS:%=$(OUT)/%/driver) $(FAULTS:%=$(OUT)/planted_%/driver)
	@for step in $(TOOLS:%=run_%) $(FAULTS:%=planted_%); do \
	    $(MAKE) --no-print-directory OUT=$(OUT) $$step || exit 1; \
	done
	@echo "hostcx: no tool found a fault, and each found the one planted for it"
