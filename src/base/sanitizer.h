// Which sanitizer this code is compiled for: KDA_ADDRESS_SANITIZER, KDA_THREAD_SANITIZER. GCC and Clang say it
// differently.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KDA_ADDRESS_SANITIZER 1
#elif __has_feature(thread_sanitizer)
#define KDA_THREAD_SANITIZER 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define KDA_ADDRESS_SANITIZER 1
#elif defined(__SANITIZE_THREAD__)
#define KDA_THREAD_SANITIZER 1
#endif
